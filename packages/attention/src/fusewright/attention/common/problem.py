"""One call of attention as its kernels and their tables see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._core.backends import DeviceProperties, device_properties, interpreted
from .._core.launches import Layout, cdiv
from .._core.precision import power_of_2
from .operands import MAX_ROW_STRIDE, Shape, describable, head_strides, present, to_copy

# A product of tiles takes no fewer.
SMALLEST_TILE = 16


class Problem(NamedTuple):
    """Sizes, what the call runs on, which operands are copied first, whether tensor descriptors
    span them, and the integers and constants that every kernel takes first.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device
    gpu: DeviceProperties
    copies: tuple[bool, ...]
    described: bool
    integers: tuple[int, ...]
    constants: dict[str, Any]

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


def problem_of(
    shape: Shape,
    keys: int,
    operands: Sequence[Layout | None],
    aligned: bool,
    precision: str,
    device: torch.device,
    band: tuple[int, ...] = (),
    **constants: Any,
) -> Problem:
    """The problem of queries of this shape.

    Args:
        operands: layouts of those that have the shape of q, then of k and v.
        aligned: whether descriptors may start where these do.
        precision: of products of fp32 tiles.
        band: integers that the kernels take after the sizes.
        constants: what the kernels take after the common ones.
    """
    read = [present(layout) for layout in operands]
    batches, queries, heads, width = shape
    if heads * width > MAX_ROW_STRIDE:
        raise ValueError(f"the kernels serve up to 2**23 numbers a token, got {heads * width}")
    key_shape = (batches, keys, heads, width)
    shapes = [shape] * (len(read) - 2) + [key_shape] * 2
    strides = [
        stride
        for shape_and_layout in zip(shapes, read, strict=True)
        for stride in head_strides(*shape_and_layout)
    ]
    return Problem(
        batches,
        queries,
        keys,
        heads,
        width,
        read[-1][0],
        device,
        device_properties(device),
        to_copy(read),
        aligned and all(map(describable, shapes, read)),
        (*strides, queries, keys, heads, *band),
        dict(D=width, UPCAST=interpreted(), PRECISION=precision, **constants),
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
