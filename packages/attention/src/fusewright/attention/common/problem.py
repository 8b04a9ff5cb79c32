"""One call of attention as its kernels and their tables see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._core.backends import DeviceProperties, device_properties
from .._core.launches import Layout, cdiv, layouts
from .._core.precision import input_precision, power_of_2
from .operands import MAX_ROW_STRIDE, Shape, describable, head_strides, is_aligned, present, to_copy

# A product of tiles takes no fewer.
SMALLEST_TILE = 16


# What the plan of a call depends on beside its options: the shape of q, the number of keys, the
# layouts, whether tensor descriptors may start where the operands do, the precision of products of
# fp32 tiles, the device.
Key = tuple[Shape, int, tuple[Layout | None, ...], bool, str, torch.device]


def key_of(operands: Sequence[torch.Tensor], *others: torch.Tensor | None) -> Key:
    """The key of a call that reads these: k and v last, before them what has the shape of q; and
    others, which may be absent.
    """
    q, v = operands[0], operands[-1]
    read = layouts(*operands, *others)
    return q.shape, v.shape[1], read, is_aligned(*operands), input_precision(q.dtype), q.device


class KernelConfig(NamedTuple):
    """What a kernel that multiplies tiles is compiled for: the width of a head; the rows of tiles
    of queries and of keys, and their columns; how it reads and multiplies them.
    """

    D: int
    BLOCK_Q: int
    BLOCK_K: int
    BLOCK_D: int
    NUM_STAGES: int
    DESCRIPTORS: bool
    UPCAST: bool
    PRECISION: str


class Problem(NamedTuple):
    """Sizes, what the call runs on, how many operands are never absent, which of all are copied
    first, whether tensor descriptors span them, the precision of products of fp32 tiles, and the
    integers that every kernel takes first.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    gpu: DeviceProperties
    operands: int
    copies: tuple[bool, ...]
    described: bool
    precision: str
    integers: tuple[int, ...]

    @property
    def all_heads(self) -> int:
        """The heads of all tasks."""
        return self.batches * self.heads

    @property
    def rows(self) -> tuple[int, int, int]:
        """The shape of one number for each row of scores."""
        return self.batches, self.heads, self.queries

    @property
    def query_shape(self) -> Shape:
        """The shape of q, o and their gradients."""
        return self.batches, self.queries, self.heads, self.width

    @property
    def key_shape(self) -> Shape:
        """The shape of k, v and their gradients."""
        return self.batches, self.keys, self.heads, self.width

    @property
    def narrow(self) -> bool:
        """Whether rounding to the dtype takes something from fp32."""
        return self.dtype.itemsize < 4


def problem_of(key: Key, operands: int, band: tuple[int, ...] = ()) -> Problem:
    """The problem of a call with this key, of which so many operands are never absent; ``band`` are
    the integers that the kernels take after the sizes.
    """
    shape, keys, read_layouts, aligned, precision, device = key
    read = [present(layout) for layout in read_layouts[:operands]]
    batches, queries, heads, width = shape
    if heads * width > MAX_ROW_STRIDE:
        raise ValueError(f"the kernels serve up to 2**23 numbers a token, got {heads * width}")
    key_shape = (batches, keys, heads, width)
    shapes = [shape] * (operands - 2) + [key_shape] * 2
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
        *(batches, queries, keys, heads, width),
        read[-1][0],
        device,
        device_properties(device),
        operands,
        copies,
        aligned and all(map(describable, shapes, read)),
        precision,
        (*strides, queries, keys, heads, *band),
    )


class TileConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes`` with tiles of ``queries`` and
    ``keys`` rows.

    A line for Hopper serves compute capability 9.0 alone, and heads whose width is a power of 2;
    with ``descriptors``, operands that tensor descriptors span, and reads by them.
    """

    max_width: int
    max_bytes: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    descriptors: bool = False


# For the lines of a table that serve Hopper alone: operands by pointers, or by descriptors.
HOPPER = dict(hopper=True)
DESCRIBED = dict(hopper=True, descriptors=True)


def tile_config(table: tuple[TileConfig, ...], problem: Problem) -> TileConfig:
    """The first line of a table that serves heads of this width, in memory as these."""
    return next(
        line
        for line in table
        if problem.width <= line.max_width
        and problem.dtype.itemsize <= line.max_bytes
        and (on_hopper(problem) or not line.hopper)
        and (problem.described or not line.descriptors)
    )


def on_hopper(problem: Problem) -> bool:
    """Whether the lines for Hopper serve."""
    return problem.gpu.capability == 90 and problem.width == tile_rows(problem.width)


def tile_rows(number: int) -> int:
    """The rows, or columns, of a tile that holds this many: a power of 2 that a product takes."""
    return max(SMALLEST_TILE, power_of_2(number))


def chunk_rows(tasks: int, queries: int, block: int, programs: int) -> int:
    """How many queries a chunk has, in whole blocks, so that the chunks of so many tasks and heads
    make about this number of programs.
    """
    chunks = max(1, programs // tasks)
    return max(1, cdiv(queries, chunks * block)) * block
