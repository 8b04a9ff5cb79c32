"""Launches that several optimizers share: how each is planned, the sum of squares of many tensors,
and the program that prepares a step.

The tables are of docs/decisions/0008-adamw-launch-h200.csv, but for PREPARE, which is unmeasured.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import Launch
from .._core.lazy import lazy_module
from .group_numbers import GroupNumbers
from .step import Part, Step
from .tables import Blocks, addresses_of, upload

if TYPE_CHECKING:
    from . import kernels, tiles
else:
    kernels = lazy_module(__package__, "kernels")
    tiles = lazy_module(__package__, "tiles")

Tensor = torch.Tensor


class Block(NamedTuple):
    """One program takes ``size`` elements of one tensor."""

    size: int
    num_warps: int


class GridStride(NamedTuple):
    """``programs_per_sm`` programs stay on each multiprocessor; each takes a block of ``size``,
    then the one as many blocks further as there are programs, and so on.
    """

    size: int
    num_warps: int
    programs_per_sm: int


SQUARES = GridStride(size=4096, num_warps=8, programs_per_sm=4)
# Of the one program that prepares a step: this many tensors, or partial sums, at a time.
PREPARE = Block(size=512, num_warps=4)


@functools.lru_cache(maxsize=4096)
def planned(
    module: ModuleType,
    device: torch.device,
    kernel: str,
    grid: tuple[int, ...],
    integers: tuple[int, ...],
    table: Any,
    registers: int | None = None,
    **constants: Any,
) -> Launch:
    """The launch of a module's kernel by a tuned table, made once for equal arguments.

    The kernel gets one constant, the record ``CONFIG``: the table's numbers and the constants, by
    their names in capitals, torch's dtypes as Triton's. They have to tell launches apart whose
    tensors differ in dtype or absence.
    """
    # Other programs compute while one reads: prefetching only adds instructions.
    options = dict(num_warps=table.num_warps, num_stages=1)
    if registers is not None:
        options["maxnreg"] = registers
    named = {name.upper(): x for name, x in table._asdict().items()} | constants
    record: Any = namedtuple("Config", named)  # type: ignore[misc]
    config = record(*(tiles.DTYPES.get(x, x) for x in named.values()))
    return Launch(getattr(module, kernel), grid, device, integers, options, CONFIG=config)


def programs_of(stride: GridStride, blocks: int, device: torch.device) -> int:
    """As many as the GPU holds at once, but none without a block."""
    resident = device_properties(device).multiprocessors * stride.programs_per_sm
    return max(1, min(blocks, resident))


class Squares:
    """Sums of squares of tensors of these lengths and this dtype: ``[programs]`` in fp64."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = Blocks(lengths, SQUARES.size, device)
        self.dtype, self.device = dtype, device
        self.grid = (programs_of(SQUARES, self.blocks.count, device),)
        self.planned = functools.partial(planned, kernels, device)

    def __call__(self, addresses: Tensor, aligned: bool) -> Tensor:
        """Of the tensors at these addresses."""
        partials = torch.empty(self.grid, dtype=torch.float64, device=self.device)
        integers, constants = (self.blocks.count,), dict(G=self.dtype, ALIGNED=aligned)
        launch = self.planned("squares_kernel", self.grid, integers, SQUARES, **constants)
        launch((addresses, *self.blocks.tables, partials))
        return partials


class KernelPart(Part):
    """Members that kernels move, and the launch that prepares a step.

    Args:
        module: of the kernels.
        kernel: of its programs that prepares a step; the module's GROUP_NUMBERS are of a group.
        columns: how many numbers a step has of each member.

    Attributes:
        table: these numbers, ``[members, columns]``.
    """

    def __init__(
        self,
        members: Sequence[Any],
        rules: Any,
        device: torch.device,
        module: Any,
        kernel: str,
        columns: int,
    ) -> None:
        super().__init__(members, rules, device)
        self.kernel, self.planned = kernel, functools.partial(planned, module, device)
        self.table = torch.empty(len(members), columns, dtype=torch.float32, device=device)
        self.group_numbers = GroupNumbers(module.GROUP_NUMBERS.value * rules.groups, device)
        self.max_norm = upload([rules.max_grad_norm or 0.0], torch.float64, device)
        self.tables = (
            upload([x.group for x in members], torch.int32, device),
            upload([x.sign for x in members], torch.float32, device),
            upload(addresses_of(x.step for x in members), torch.int64, device),
        )

    def prepare(
        self,
        step: Step,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        **constants: Any,
    ) -> None:
        """Decide whether the step is taken, and write its numbers."""
        partials, grad_scale, found_inf, *results, norm_below = step
        launch = self.planned(
            self.kernel,
            (1,),
            (0 if partials is None else len(partials), len(self.members)),
            PREPARE,
            HAS_NORM=partials is not None,
            CLIPS=self.rules.max_grad_norm is not None,
            HAS_SCALE=grad_scale is not None,
            HAS_FOUND=found_inf is not None,
            NORM_BELOW=math.inf if partials is None else norm_below,
            **constants,
        )
        decisive = partials, self.max_norm, grad_scale, found_inf
        groups = self.group_numbers.tables
        launch((*decisive, *groups, *self.tables, *inputs, *results, self.table, *outputs))
