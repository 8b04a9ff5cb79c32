"""What the launches of several families have in common: tables of tiles, constants of kernels,
strides, grids, chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import Layout, contiguous_strides
from .._core.precision import power_of_2

Shape = tuple[int, ...]
# tl.dot takes no smaller tile.
SMALLEST_TILE = 16
# The offsets inside a tile are 32-bit numbers.
MAX_ROW_STRIDE = 2**23


class TileConfig(NamedTuple):
    """Serves widths up to ``max_width`` of numbers up to ``max_bytes`` with tiles of ``queries``
    and ``keys`` rows. A line for Hopper serves compute capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    hopper: bool = False


class WidthConfig(Protocol):
    """A line of a table that is chosen by width, size of a number and compute capability."""

    @property
    def max_width(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def hopper(self) -> bool: ...


Config = TypeVar("Config", bound=WidthConfig)


def config_for(
    table: tuple[Config, ...], width: int, itemsize: int, device: torch.device
) -> Config:
    """The first line of a table that serves rows of this width, of numbers of this size, on this
    device. Results depend on the line only by rounding.
    """
    hopper = device_properties(device).capability == 90
    return next(
        config
        for config in table
        if width <= config.max_width
        and itemsize <= config.max_bytes
        and (hopper or not config.hopper)
    )


class TileConstants(NamedTuple):
    """What a kernel over tiles of queries and keys is compiled for, read as ``CONFIG``. With FILL,
    scores that no row may see are written too; GATED: of the indexer's two forms.
    """

    D: int
    BLOCK_D: int
    CAUSAL: bool
    UPCAST: bool
    PRECISION: str
    BLOCK_Q: int
    BLOCK_K: int
    NUM_STAGES: int
    FILL: bool
    GATED: bool


def tile_constants(
    width: int,
    causal: bool,
    precision: str,
    config: TileConfig,
    fill: bool = False,
    gated: bool = True,
) -> TileConstants:
    return TileConstants(
        *(width, block_width(width), causal, interpreted(), precision),
        *(config.queries, config.keys, config.num_stages, fill, gated),
    )


def block_width(width: int) -> int:
    """The columns of a tile of rows of this width."""
    return max(power_of_2(width), SMALLEST_TILE)


def row_strides(shape: Shape, layout: Layout) -> tuple[bool, tuple[int, ...]]:
    """Whether an operand of rows is copied before the kernels read it, and the strides by which
    they do: the last axis is contiguous, and its stride no parameter of theirs.
    """
    copy = layout[1][-1] != 1 or layout[1][1] > MAX_ROW_STRIDE
    return copy, (contiguous_strides(shape) if copy else layout[1])[:-1]


def grid_of(programs: int) -> tuple[int]:
    """A grid of this many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles, got {programs}")
    return (programs,)


def chunks_of_rows(rows: int, tile: int, fits: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Chunks ``(first, last)``: rows from ``first`` to before ``last``, whole tiles but the last
    one. A chunk is one tile, or ``fits``.
    """
    chunks: list[tuple[int, int]] = []
    first = 0
    while first < rows:
        last = first + tile
        while last < rows and fits(first, last + tile):
            last += tile
        chunks.append((first, min(last, rows)))
        first = last
    return chunks
