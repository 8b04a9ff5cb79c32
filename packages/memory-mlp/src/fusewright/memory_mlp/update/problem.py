"""One pooled update as its kernels see it, and the launches that both passes make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import DeviceProperties, device_properties, interpreted
from .._core.launches import Allocator, Launch, Layout, allocator, cdiv, contiguous_strides
from .._core.lazy import lazy_module
from .._core.precision import allows_tf32, round_up
from .._core.rows import row_strides as strides_of_rows
from ..common.operands import needs_copy
from ..common.weights import weight_shapes

if TYPE_CHECKING:
    from . import kernels_gradients, kernels_transpose
else:
    kernels_gradients = lazy_module(__package__, "kernels_gradients")
    kernels_transpose = lazy_module(__package__, "kernels_transpose")

# Offsets within a tile are 32-bit numbers, and so are rows and programs.
MAX_ROW_STRIDE = 2**22
MAX_COUNT = 2**31 - 2**10
# Rows of a transposed operand are padded with zeros to a multiple of this; ROW_MULTIPLE of
# tiles.py, without triton's type.
ROW_MULTIPLE = 16


class UpdateTile(NamedTuple):
    """Serves products of one ``precision`` ("narrow": bf16 and fp16, "tf32", "ieee") with tiles of
    ``rows`` by ``cols`` that add ``depth`` products at a time.

    It does where these make at least ``fills`` programs for each multiprocessor and, with
    ``aligned``, where all rows start at multiples of 16 numbers; a line for Hopper on compute
    capability 9.0 alone.
    """

    precision: str
    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    fills: float = 0.0
    aligned: bool = True
    hopper: bool = False


class UpdateBlock(NamedTuple):
    """One program takes ``block`` elements of one tensor."""

    block: int
    num_warps: int


class ProductConfig(NamedTuple):
    """The constants of a kernel that multiplies tiles."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    NUM_STAGES: int
    UPCAST: bool
    PRECISION: str
    # Whether the depth is a multiple of BLOCK_K.
    EVEN: bool
    OVERLAPS: bool
    TRANSPOSED: bool
    ACTIVATION: str
    SPLIT: bool = False


class ElementConfig(NamedTuple):
    """The constants of a kernel over elements."""

    BLOCK: int
    UPCAST: bool
    PRECISION: str
    OVERLAPS: bool = False
    ROUNDS: bool = False
    CLIPS: bool = False


HOPPER: dict[str, Any] = dict(hopper=True)
# Serve wherever no line above does.
ANY: dict[str, Any] = dict(rows=32, cols=32, depth=32, num_warps=4, num_stages=2, aligned=False)
ANY_SIZE = tuple(UpdateTile(precision, **ANY) for precision in ("narrow", "tf32", "ieee"))
# With the small tiles of the sums over rows.
GRADIENTS_ANY_SIZE = (
    ANY_SIZE[0]._replace(num_warps=8),
    *(line._replace(num_stages=1) for line in ANY_SIZE[1:]),
)

# Source: results/tuning-update-h200-torch2.11-triton3.6.csv for the side of the square tiles that
# are transposed, at most 7 % slower than the fastest; ADD_SPLITS is unmeasured.
TRANSPOSE = UpdateBlock(block=64, num_warps=8)
ADD_SPLITS = UpdateBlock(block=512, num_warps=4)

# From this compute capability on, programs of a launch are placed while the launch before it ends.
OVERLAP_FROM = 90

# Where the tiles of the weights' gradients are fewer programs than this for each multiprocessor,
# its rows are split among several, at least ROWS_OF_A_SPLIT to each.
SPLIT_BELOW = 0.5
ROWS_OF_A_SPLIT = 512

# (inner, outer_stride, inner_stride, row_stride): the rows of problem i begin at element
# i // inner * outer_stride + i % inner * inner_stride.
RowStrides = tuple[int, int, int, int]


class UpdateProblem(NamedTuple):
    """``problems`` memories of ``hidden`` units, each with ``rows`` pairs of a key and a value as
    wide as ``width``.

    ``keys`` and ``values`` say how their rows are reached. With ``by_turns`` the products over rows
    are those of Hopper's kernel, and launches do not overlap: its programs leave the next ones no
    shared memory.
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
    gpu: DeviceProperties
    keys: RowStrides
    values: RowStrides
    by_turns: bool = False

    @property
    def rounds(self) -> bool:
        """Whether the weights are rounded for the products."""
        return self.precision != "ieee"

    @property
    def transposes(self) -> bool:
        """Whether operands are stored transposed too: TF32 products add along contiguous axes."""
        return self.precision == "tf32"

    @property
    def padded_rows(self) -> int:
        """How many rows the sums over rows add: transposed operands are padded with zeros."""
        return round_up(self.rows, ROW_MULTIPLE) if self.transposes else self.rows

    @property
    def key_operands(self) -> RowStrides:
        """How the products reach the rows of k: rounded ones are contiguous."""
        return (1, self.rows * self.width, 0, self.width) if self.transposes else self.keys

    @property
    def summed_keys(self) -> RowStrides:
        """How the sums over rows reach k."""
        rows = self.padded_rows
        return (1, self.width * rows, 0, rows) if self.transposes else self.keys

    @property
    def overlaps(self) -> bool:
        """Whether the programs of a launch may be placed while the one before it in the pass ends;
        exact fp32 products take so long that it would save nothing.
        """
        if not self.rounds or self.by_turns:
            return False
        return self.gpu.capability >= OVERLAP_FROM and not interpreted()

    @property
    def aligned(self) -> bool:
        """Whether all rows start at multiples of 16 numbers."""
        strides = *self.keys[1:], *self.values[1:]
        return not any(number % 16 for number in (self.width, self.hidden, *strides))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.width, self.hidden

    def allocator(self, *shape: int, dtype: torch.dtype = torch.float32) -> Allocator:
        """For a tensor of ``shape`` for each problem."""
        return allocator((*self.lead, *shape), dtype, self.device)

    def operand(self, *shape: int) -> Allocator:
        """For an operand of a product."""
        return self.allocator(*shape, dtype=self.dtype)

    def transposed_rows(self) -> tuple[Allocator | None, ...]:
        """For k as an operand, and for transposes of rows of ``width`` and of ``hidden`` numbers;
        None where they are not kept.
        """
        if not self.transposes:
            return None, None, None
        keys, rows = self.operand(self.rows, self.width), self.padded_rows
        return keys, self.operand(self.width, rows), self.operand(self.hidden, rows)

    def weight_operands(self) -> tuple[Allocator, Allocator]:
        """For w1 and w2, or tensors as large, in the dtype of the products."""
        return self.operand(self.hidden, self.width), self.operand(self.width, self.hidden)

    def options(self, num_warps: int, overlaps: bool) -> dict[str, Any]:
        """Triton's own options of a launch."""
        return dict(num_warps=num_warps, **(dict(launch_pdl=True) if overlaps else {}))

    def weights(self) -> tuple[Allocator, ...]:
        """For the tensors of a MemoryWeights."""
        return tuple(self.allocator(*shape) for shape in weight_shapes((), self.hidden, self.width))

    def tile(self, table: tuple[UpdateTile, ...], cols: int) -> UpdateTile:
        """The line that serves a product of all rows by ``cols`` columns."""
        return self.tile_of(table, self.rows, cols, self.problems)

    def tile_of(
        self, table: tuple[UpdateTile, ...], rows: int, cols: int, count: int
    ) -> UpdateTile:
        """The first line of the table that serves ``count`` products of ``rows`` by ``cols``."""
        return next(
            line
            for line in table
            if line.precision == self.precision
            and (self.aligned or not line.aligned)
            and (self.gpu.capability == 90 or not line.hopper)
            and count * cdiv(rows, line.rows) * cdiv(cols, line.cols)
            >= line.fills * self.gpu.multiprocessors
        )

    def product_launch(
        self,
        kernel: Any,
        line: UpdateTile,
        programs: int,
        depth: int,
        integers: tuple[int, ...],
        split: bool = False,
    ) -> Launch:
        """``programs`` programs of a kernel whose products add ``depth`` numbers, after another
        launch of the same pass.
        """
        overlaps = self.overlaps
        config = ProductConfig(
            line.rows,
            line.cols,
            line.depth,
            line.num_stages,
            interpreted(),
            "ieee" if self.precision == "narrow" else self.precision,
            depth % line.depth == 0,
            overlaps,
            self.transposes,
            self.activation,
            split,
        )
        options = self.options(line.num_warps, overlaps)
        return Launch(kernel, grid_of(programs), self.device, integers, options, CONFIG=config)

    def rows_launch(
        self, kernel: Any, line: UpdateTile, cols: int, integers: tuple[int, ...]
    ) -> Launch:
        """One program for every tile of [rows, cols] of every problem: of ``width`` or ``hidden``
        columns, each the sum of as many products as the other of both says.
        """
        depth = self.width + self.hidden - cols
        programs = self.problems * cdiv(self.rows, line.rows) * cdiv(cols, line.cols)
        return self.product_launch(kernel, line, programs, depth, integers)

    def element_programs(self, block: int) -> int:
        """How many blocks the four tensors of one memory are."""
        matrix = self.hidden * self.width
        return sum(cdiv(size, block) for size in (matrix, matrix, self.hidden, self.width))

    def element_launch(
        self,
        kernel: Any,
        config: UpdateBlock,
        integers: tuple[int, ...],
        programs: int | None = None,
        first: bool = False,
        clips: bool = False,
    ) -> Launch:
        """As many programs for each problem, or one for every block of every tensor of its memory;
        the first launch of a pass waits until all before it has ended.
        """
        overlaps = self.overlaps and not first
        if programs is None:
            programs = self.element_programs(config.block)
        return Launch(
            kernel,
            grid_of(self.problems * programs),
            self.device,
            integers,
            self.options(config.num_warps, overlaps),
            CONFIG=ElementConfig(
                config.block, interpreted(), self.precision, overlaps, self.rounds, clips
            ),
        )


def problem_of(
    shape: Sequence[int],
    hidden: int,
    inputs: tuple[Layout | None, ...],
    activation: str,
    precision: str,
    device: torch.device,
) -> tuple[UpdateProblem, tuple[bool, ...]]:
    """The problem of keys of this shape, [*lead, rows, width], and which of the update's inputs are
    copied first, empty where none is.

    Raises:
        ValueError: there are more rows than the kernels can count.
    """
    *lead, rows, width = shape
    if rows > MAX_COUNT or max(width, hidden) > MAX_ROW_STRIDE:
        raise ValueError(
            f"the kernels serve up to {MAX_COUNT} rows and {MAX_ROW_STRIDE} numbers a row, got "
            f"{rows} rows, keys of {width} and {hidden} hidden units"
        )
    keys, values, *others = inputs
    assert keys is not None
    assert values is not None
    key_strides, value_strides = row_strides(shape, keys[1]), row_strides(shape, values[1])
    contiguous = row_strides(shape, contiguous_strides(shape))
    assert contiguous is not None
    problem = UpdateProblem(
        math.prod(lead),
        rows,
        width,
        hidden,
        tuple(lead),
        keys[0],
        precision,
        activation,
        device,
        device_properties(device),
        key_strides or contiguous,
        value_strides or contiguous,
    )
    shapes = *weight_shapes(lead, hidden, width) * 2, *(tuple(lead),) * 3, (*lead, rows)
    copies = (
        *(key_strides is None, value_strides is None),
        *(needs_copy(*each) for each in zip(shapes, others, strict=True)),
    )
    return problem, copies if any(copies) else ()


def row_strides(shape: Sequence[int], strides: Sequence[int]) -> RowStrides | None:
    """How the rows of [*lead, rows, width] are reached; None where the last axis is not contiguous,
    the leading axes need three strides or the rows lie too far apart.
    """
    *lead, _, width = shape
    *lead_strides, row_stride, column_stride = strides
    if row_stride > MAX_ROW_STRIDE:
        return None
    places = strides_of_rows((*lead, width), (*lead_strides, column_stride))
    return None if places is None else (*places, row_stride)


def tile_precision(dtype: torch.dtype) -> str:
    """How tiles of this dtype are multiplied: fp32 ones as torch multiplies matrices on a GPU."""
    if dtype.itemsize < 4:
        return "narrow"
    return "tf32" if allows_tf32() else "ieee"


def grid_of(programs: int) -> tuple[int]:
    """A grid of ``programs`` programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs > MAX_COUNT:
        raise ValueError(f"the kernels serve up to {MAX_COUNT} tiles, got {programs}")
    return (programs,)


def transpose_launch(problem: UpdateProblem, backward: bool) -> Launch:
    """The operands of TF32 products that no launch of the pass writes as they are needed."""
    rows, width, hidden = (cdiv(size, TRANSPOSE.block) for size in problem.sizes)
    weights, keys, units = hidden * width, rows * width, rows * hidden
    programs = 4 * weights + 2 * keys + units if backward else 2 * weights + keys
    integers = (*problem.keys, *problem.sizes, programs)
    return problem.element_launch(
        kernels_transpose.transpose_kernel,
        TRANSPOSE,
        integers,
        programs,
        first=not backward,
    )


class GradientsPlan(NamedTuple):
    """Gradients of weights and biases from all rows: one launch, and where the rows of a tile are
    split among programs, one that adds their partial sums, of each weight a ``part``.

    ``slots``: how many sums of squares each problem has.
    """

    launch: Launch
    slots: int
    add: Launch | None = None
    part: Allocator | None = None

    def run(
        self,
        operands: tuple[torch.Tensor | None, ...],
        sums: tuple[torch.Tensor | None, torch.Tensor | None],
        norm: torch.Tensor | None,
        out: Sequence[torch.Tensor | None],
        squares: torch.Tensor | None,
        factor: float,
    ) -> None:
        """Write ``out``, the tensors of a MemoryWeights, from the operands a1, k, a2, b2, a3, b3
        and the column sums of a1 and of the last left operand: forward with the squares, backward,
        where there is a norm, added to what lies there.
        """
        if self.add is None or self.part is None:
            self.launch((*operands, *sums, norm, *out, squares), (factor,))
            return
        parts = self.part(), self.part()
        # The biases are left to the second launch.
        unwritten = (parts[0], None, parts[1], None)
        self.launch((*operands, None, None, None, *unwritten, None), (factor,))
        self.add((*parts, *sums, norm, *out, squares), (factor,))


def plan_gradients(
    problem: UpdateProblem,
    table: tuple[UpdateTile, ...],
    row_tiles: tuple[int, int],
) -> GradientsPlan:
    """``row_tiles``: of how many tiles of rows there are column sums, for b1 and for b2."""
    rows, width, hidden = problem.sizes
    # Both weights count.
    line = problem.tile_of(table, hidden, width, 2 * problem.problems)
    one = cdiv(hidden, line.rows) * cdiv(width, line.cols)
    other = cdiv(width, line.rows) * cdiv(hidden, line.cols)
    splits, rows_of_split = split_rows(problem, line, one + other)
    split = splits > 1
    biases = cdiv(hidden, line.cols) + cdiv(width, line.cols)
    programs = splits * (one + other) + (0 if split else biases)
    launch = problem.product_launch(
        kernels_gradients.gradients_kernel,
        line,
        problem.problems * programs,
        problem.padded_rows,
        (
            *problem.summed_keys,
            rows,
            width,
            hidden,
            problem.problems,
            programs,
            splits,
            rows_of_split,
            *row_tiles,
        ),
        split,
    )
    if not split:
        return GradientsPlan(launch, programs)
    slots = problem.element_programs(ADD_SPLITS.block)
    add = problem.element_launch(
        kernels_gradients.add_splits_kernel,
        ADD_SPLITS,
        (width, hidden, problem.problems, slots, splits, *row_tiles),
    )
    shape = (splits, problem.problems, hidden * width)
    part = allocator(shape, torch.float32, problem.device)
    return GradientsPlan(launch, slots, add, part)


def split_rows(problem: UpdateProblem, line: UpdateTile, matrix_tiles: int) -> tuple[int, int]:
    """Among how many programs the rows of a tile are split, and how many rows each of them adds, a
    multiple of the tile's depth.
    """
    programs, multiprocessors = problem.problems * matrix_tiles, problem.gpu.multiprocessors
    splits = 1
    if programs < SPLIT_BELOW * multiprocessors:
        splits = min(multiprocessors // max(programs, 1), problem.rows // ROWS_OF_A_SPLIT)
    rows = round_up(cdiv(problem.rows, max(splits, 1)), line.depth)
    return max(cdiv(problem.rows, max(rows, 1)), 1), rows
