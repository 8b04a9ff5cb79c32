"""One pooled update as its kernels see it, and what every launch of it shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from ._backends import Card, card_of, interpreted
from ._launch import Allocate, Kind, Launch, contiguous_strides, memory
from ._update_configs import OVERLAP_FROM, UpdateBlock, UpdateTile, update_tile
from .weights import weight_shapes

# Offsets within a tile are 32-bit numbers, and so are rows and programs.
MAX_ROW_STRIDE = 2**22
MAX_COUNT = 2**31 - 2**10
# _update_tiles.ROWS_OF_A_TURN, without triton's type.
ROWS_OF_A_TURN = 16

Walk = tuple[int, int, int, int]
MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


class UpdateProblem(NamedTuple):
    """``problems`` memories of ``hidden`` units, each with ``rows`` pairs of a key and a value as
    wide as ``width``.

    ``keys`` and ``values`` say how their rows are reached, ``copies`` whether they are copied
    first.
    """

    problems: int
    rows: int
    width: int
    hidden: int
    lead: tuple[int, ...]
    dtype: torch.dtype
    precision: str
    activation: str
    device: torch.device
    card: Card
    keys: Walk
    values: Walk
    copies: tuple[bool, bool]

    @property
    def rounds(self) -> bool:
        """Whether the weights are rounded for the products."""
        return self.precision != "ieee"

    @property
    def turns(self) -> bool:
        """Whether operands are kept turned too: TF32 products walk along contiguous numbers."""
        return self.precision == "tf32"

    @property
    def walked_rows(self) -> int:
        """How many rows the sums over rows walk: turned operands are filled up with zeros."""
        if not self.turns:
            return self.rows
        return triton.cdiv(self.rows, ROWS_OF_A_TURN) * ROWS_OF_A_TURN

    @property
    def key_operands(self) -> Walk:
        """How the products reach the rows of k: rounded ones lie one after the other."""
        return (1, self.rows * self.width, 0, self.width) if self.turns else self.keys

    @property
    def summed_keys(self) -> Walk:
        """How the sums over rows reach k."""
        rows = self.walked_rows
        return (1, self.width * rows, 0, rows) if self.turns else self.keys

    @property
    def overlaps(self) -> bool:
        """Whether the programs of a launch may be placed while the one before it in the pass ends;
        exact fp32 products take so long that it would save nothing.
        """
        return self.rounds and self.card.capability >= OVERLAP_FROM and not interpreted()

    @property
    def aligned(self) -> bool:
        """Whether all rows start at multiples of 16 numbers."""
        strides = *self.keys[1:], *self.values[1:]
        return not any(number % 16 for number in (self.width, self.hidden, *strides))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.width, self.hidden

    def memory(self, *shape: int, dtype: torch.dtype = torch.float32) -> Allocate:
        """Of ``shape`` for each problem."""
        return memory((*self.lead, *shape), dtype, self.device)

    def operand(self, *shape: int) -> Allocate:
        return self.memory(*shape, dtype=self.dtype)

    def turned_rows(self, cols: int) -> Allocate | None:
        """Of an operand [rows, cols], turned; None where it is not kept so."""
        return self.operand(cols, self.walked_rows) if self.turns else None

    def options(self, num_warps: int, overlaps: bool) -> dict[str, Any]:
        """What triton takes beside the arguments of a kernel."""
        return dict(num_warps=num_warps, **(dict(launch_pdl=True) if overlaps else {}))

    def weights(self) -> tuple[Allocate, ...]:
        """What a MemoryWeights takes."""
        return tuple(self.memory(*shape) for shape in weight_shapes((), self.hidden, self.width))

    def tile(self, table: tuple[UpdateTile, ...], cols: int) -> UpdateTile:
        """The line that serves a product of all rows by ``cols`` columns."""
        return self.tile_of(table, self.rows, cols, self.problems)

    def tile_of(
        self, table: tuple[UpdateTile, ...], rows: int, cols: int, count: int
    ) -> UpdateTile:
        """The line that serves ``count`` products of ``rows`` by ``cols``."""
        return update_tile(table, self.precision, self.card, self.aligned, rows, cols, count)


def problem_of(
    shape: Sequence[int],
    hidden: int,
    keys: Kind,
    values: Kind,
    activation: str,
    precision: str,
    device: torch.device,
) -> UpdateProblem:
    """The problem of keys of this shape, [*lead, rows, width].

    Raises:
        ValueError: there are more rows than the kernels can count.
    """
    *lead, rows, width = shape
    if rows > MAX_COUNT or max(width, hidden) > MAX_ROW_STRIDE:
        raise ValueError(
            f"the kernels serve up to {MAX_COUNT} rows and {MAX_ROW_STRIDE} numbers a row, got "
            f"{rows} rows, keys of {width} and {hidden} hidden units"
        )
    found = walk(shape, keys[1]), walk(shape, values[1])
    line_up = walk(shape, contiguous_strides(shape))
    assert line_up is not None
    return UpdateProblem(
        math.prod(lead),
        rows,
        width,
        hidden,
        tuple(lead),
        keys[0],
        precision,
        activation,
        device,
        card_of(device),
        found[0] or line_up,
        found[1] or line_up,
        (found[0] is None, found[1] is None),
    )


def walk(shape: Sequence[int], strides: Sequence[int]) -> Walk | None:
    """How the rows of [*lead, rows, width] are reached.

    Returns:
        ``(inner, outer_stride, inner_stride, row_stride)``: the rows of problem i begin at element
        ``i // inner * outer_stride + i % inner * inner_stride``. None where the last axis is not
        contiguous, the leading axes need three strides or the rows lie too far apart.
    """
    *lead, _, width = shape
    if (strides[-1] != 1 and width != 1) or strides[-2] > MAX_ROW_STRIDE:
        return None
    axes: list[tuple[int, int]] = []
    for length, stride in zip(lead, strides, strict=False):
        if length == 1:
            continue
        if axes and axes[-1][1] == length * stride:
            axes[-1] = (axes[-1][0] * length, stride)
        else:
            axes.append((length, stride))
    if len(axes) > 2:
        return None
    if len(axes) == 2:
        return axes[1][0], axes[0][1], axes[1][1], strides[-2]
    return 1, axes[0][1] if axes else 0, 0, strides[-2]


def precision_of(dtype: torch.dtype) -> str:
    """How tiles of this dtype are multiplied: fp32 ones as torch multiplies matrices on a card."""
    if dtype.itemsize < 4:
        return "narrow"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def product_launch(
    kernel: Any,
    problem: UpdateProblem,
    line: UpdateTile,
    programs: int,
    depth: int,
    integers: tuple[int, ...],
    **constants: Any,
) -> Launch:
    """So many programs of a kernel that multiplies tiles along an axis as long as ``depth``, after
    another launch of the same pass.
    """
    overlaps = problem.overlaps
    return Launch(
        kernel,
        grid_of(programs),
        problem.device,
        integers,
        problem.options(line.num_warps, overlaps),
        **constants,
        UPCAST=interpreted(),
        PRECISION="ieee" if problem.precision == "narrow" else problem.precision,
        EVEN=depth % line.depth == 0,
        OVERLAPS=overlaps,
        BLOCK_M=line.rows,
        BLOCK_N=line.cols,
        BLOCK_K=line.depth,
        NUM_STAGES=line.num_stages,
    )


def row_product_launch(
    kernel: Any,
    problem: UpdateProblem,
    line: UpdateTile,
    cols: int,
    depth: int,
    integers: tuple[int, ...],
    **constants: Any,
) -> Launch:
    """One program for every tile of [rows, cols] of every problem."""
    programs = problem.problems * tiles(problem.rows, line) * triton.cdiv(cols, line.cols)
    return product_launch(kernel, problem, line, programs, depth, integers, **constants)


def tiles(rows: int, line: UpdateTile) -> int:
    """How many tiles cover the rows."""
    return triton.cdiv(rows, line.rows)


def element_programs(problem: UpdateProblem, block: int) -> int:
    """How many blocks the four tensors of one memory are."""
    matrix = problem.hidden * problem.width
    return sum(triton.cdiv(size, block) for size in (matrix, matrix, problem.hidden, problem.width))


def element_launch(
    kernel: Any,
    problem: UpdateProblem,
    config: UpdateBlock,
    integers: tuple[int, ...],
    first: bool = False,
    **constants: Any,
) -> Launch:
    """One program for every block of every tensor of every memory; the first launch of a pass waits
    until all before it has ended.
    """
    overlaps = problem.overlaps and not first
    return Launch(
        kernel,
        grid_of(problem.problems * element_programs(problem, config.block)),
        problem.device,
        integers,
        problem.options(config.num_warps, overlaps),
        **constants,
        OVERLAPS=overlaps,
        BLOCK=config.block,
    )


def grid_of(programs: int) -> tuple[int]:
    """A grid of so many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs > MAX_COUNT:
        raise ValueError(f"the kernels serve up to {MAX_COUNT} tiles, got {programs}")
    return (programs,)


def in_line(x: MaybeTensor) -> MaybeTensor:
    """x, or a contiguous copy."""
    return x if x is None or x.is_contiguous() else x.contiguous()
