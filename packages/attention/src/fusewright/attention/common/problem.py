"""One call of attention as its kernels and their tables see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._core.backends import DeviceProperties, device_properties
from .._core.launches import Layout, cdiv, layouts
from .._core.precision import input_precision, power_of_2
from .operands import MAX_ROW_STRIDE, Shape, describable, head_strides, is_aligned, present, to_copy
from .outputs import WORD

# A product of tiles takes no fewer.
SMALLEST_TILE = 16


# What the plan of a call depends on beside its options: the shapes of q and of v, the layouts,
# whether tensor descriptors may start where the operands do, the precision of products of fp32
# tiles, the device.
Key = tuple[Shape, Shape, tuple[Layout | None, ...], bool, str, torch.device]


def key_of(operands: Sequence[torch.Tensor], *others: torch.Tensor | None) -> Key:
    """The key of a call that reads these: q, k and v last, before them what has the shape of o; and
    others, which may be absent, the last of which are sinks.
    """
    q, v = operands[-3], operands[-1]
    read = layouts(*operands, *others)
    return q.shape, v.shape, read, is_aligned(*operands), input_precision(q.dtype), q.device


class KernelConfig(NamedTuple):
    """What a kernel that multiplies tiles is compiled for: the width of a head and of its values;
    the rows of tiles of queries and of keys, their columns, and those of values; how it reads and
    multiplies them.
    """

    D: int
    DV: int
    BLOCK_Q: int
    BLOCK_K: int
    BLOCK_D: int
    BLOCK_V: int
    NUM_STAGES: int
    DESCRIPTORS: bool
    UPCAST: bool
    PRECISION: str


class Problem(NamedTuple):
    """Sizes, what the call runs on, how many operands are never absent, the layout of sinks, which
    of all operands are copied first, whether tensor descriptors span them, the precision of
    products of fp32 tiles, and the integers that every kernel takes first.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    gpu: DeviceProperties
    operands: int
    sinks: Layout | None
    copies: tuple[bool, ...]
    described: bool
    precision: str
    integers: tuple[int, ...]

    @property
    def all_heads(self) -> int:
        """The heads of all tasks."""
        return self.batches * self.heads

    @property
    def all_key_heads(self) -> int:
        """The heads of the keys of all tasks."""
        return self.batches * self.key_heads

    @property
    def group(self) -> int:
        """How many heads of queries read one head of keys."""
        return self.heads // max(self.key_heads, 1)

    @property
    def plain(self) -> bool:
        """Whether heads share no keys and have no sinks."""
        return self.group == 1 and self.sinks is None

    @property
    def rows(self) -> tuple[int, int, int]:
        """The shape of one number for each row of scores."""
        return self.batches, self.heads, self.queries

    @property
    def query_shape(self) -> Shape:
        """The shape of q and its gradient."""
        return self.batches, self.queries, self.heads, self.width

    @property
    def output_shape(self) -> Shape:
        """The shape of o and its gradient."""
        return self.batches, self.queries, self.heads, self.value_width

    @property
    def low_shape(self) -> Shape:
        """The shape of what rounding took from o, in words."""
        return self.batches, self.queries, self.heads, self.value_width // WORD

    @property
    def key_shape(self) -> Shape:
        """The shape of k and its gradient."""
        return self.batches, self.keys, self.key_heads, self.width

    @property
    def value_shape(self) -> Shape:
        """The shape of v and its gradient."""
        return self.batches, self.keys, self.key_heads, self.value_width

    @property
    def widest(self) -> int:
        """The greater of the widths."""
        return max(self.width, self.value_width)

    @property
    def narrow(self) -> bool:
        """Whether rounding to the dtype takes something from fp32."""
        return self.dtype.itemsize < 4


def problem_of(key: Key, operands: int, band: tuple[int, ...] = ()) -> Problem:
    """The problem of a call with this key, of which so many operands are never absent; ``band`` are
    the integers that the kernels take after the sizes.
    """
    shape, value_shape, read_layouts, aligned, precision, device = key
    read = [present(layout) for layout in read_layouts[:operands]]
    batches, queries, heads, width = shape
    _, keys, key_heads, value_width = value_shape
    numbers = heads * max(width, value_width)
    if numbers > MAX_ROW_STRIDE:
        raise ValueError(f"the kernels serve up to 2**23 numbers a token, got {numbers}")
    key_shape = (batches, keys, key_heads, width)
    output_shape = (batches, queries, heads, value_width)
    shapes = [output_shape] * (operands - 3) + [shape, key_shape, value_shape]
    strides = [
        stride
        for shape_and_layout in zip(shapes, read, strict=True)
        for stride in head_strides(*shape_and_layout)
    ]
    copies = to_copy(read)
    if copies:
        # The others are contiguous.
        copies += (False,) * (len(read_layouts) - operands)
    return Problem(
        *(batches, queries, keys, heads, key_heads, width, value_width),
        read[-1][0],
        device,
        device_properties(device),
        operands,
        read_layouts[-1],
        copies,
        aligned and all(map(describable, shapes, read)),
        precision,
        # The number of heads that share one is 1, a constant of the kernel, where none do.
        (*strides, queries, keys, heads, heads // max(key_heads, 1), *band),
    )


class TileConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes`` with tiles of ``queries`` and
    ``keys`` rows.

    A line for Hopper serves compute capability 9.0 alone, and heads whose width is a power of 2;
    with ``descriptors``, operands that tensor descriptors span, and reads by them. One with
    ``plain`` serves plain calls, and one with ``whole`` sequences that are not packed: the others
    take more registers.
    """

    max_width: int
    max_bytes: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    descriptors: bool = False
    plain: bool = False
    whole: bool = False


# For the lines of a table that serve Hopper alone: operands by pointers, or by descriptors.
HOPPER = dict(hopper=True)
DESCRIBED = dict(hopper=True, descriptors=True)


def tile_config(
    table: tuple[TileConfig, ...], problem: Problem, packed: bool = False
) -> TileConfig:
    """The first line of a table that serves heads of this width, in memory as these."""
    return next(
        line
        for line in table
        if problem.widest <= line.max_width
        and problem.dtype.itemsize <= line.max_bytes
        and (on_hopper(problem) or not line.hopper)
        and (problem.described or not line.descriptors)
        and (problem.plain or not line.plain)
        and (not packed or not line.whole)
    )


def on_hopper(problem: Problem) -> bool:
    """Whether the lines for Hopper serve."""
    widths = problem.width, problem.value_width
    return problem.gpu.capability == 90 and all(width == tile_rows(width) for width in widths)


def tile_rows(number: int) -> int:
    """The rows, or columns, of a tile that holds this many: a power of 2 that a product takes."""
    return max(SMALLEST_TILE, power_of_2(number))


def chunk_rows(tasks: int, queries: int, block: int, programs: int) -> int:
    """How many queries a chunk has, in whole blocks, so that the chunks of so many tasks and heads
    make about this number of programs.
    """
    chunks = max(1, programs // tasks)
    return max(1, cdiv(queries, chunks * block)) * block
