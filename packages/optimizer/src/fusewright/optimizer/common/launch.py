"""Launches that several optimizers share: the sum of squares of many tensors; and the tables of
those and of the program that prepares a step.

The tables are of docs/decisions/0008-adamw-launch-h200.csv, but for PREPARE, which is unmeasured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import Launch
from .._core.lazy import lazy_module
from .tables import Blocks

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


def triton_dtype(dtype: torch.dtype) -> Any:
    return tiles.DTYPES[dtype]


def programs_of(stride: GridStride, blocks: int, device: torch.device) -> int:
    """As many as the GPU holds at once, but none without a block."""
    resident = device_properties(device).multiprocessors * stride.programs_per_sm
    return max(1, min(blocks, resident))


class Squares:
    """Sums of squares of tensors of these lengths and this dtype: ``[programs]`` in fp64."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = Blocks(lengths, SQUARES.size, device)
        self.dtype, self.device = dtype, device
        self.programs = programs_of(SQUARES, self.blocks.count, device)
        self.launches: dict[bool, Launch] = {}

    def __call__(self, addresses: Tensor, aligned: bool) -> Tensor:
        """Of the tensors at these addresses."""
        if aligned not in self.launches:
            self.launches[aligned] = Launch(
                kernels.squares_kernel,
                (self.programs,),
                self.device,
                (self.blocks.count,),
                dict(num_warps=SQUARES.num_warps),
                G=triton_dtype(self.dtype),
                ALIGNED=aligned,
                SIZE=SQUARES.size,
            )
        partials = torch.empty(self.programs, dtype=torch.float64, device=self.device)
        blocks = self.blocks
        self.launches[aligned]((addresses, blocks.lengths, blocks.first, blocks.owner, partials))
        return partials
