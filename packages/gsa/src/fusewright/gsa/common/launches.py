"""What the launches of several families have in common: tables of tiles, strides, grids."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch

from .._core.backends import device_properties
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


def block_width(width: int) -> int:
    """The columns of a tile of rows of this width."""
    return max(power_of_2(width), SMALLEST_TILE)


def row_strides(shape: Shape, layout: Layout) -> tuple[bool, tuple[int, ...]]:
    """Whether an operand of rows is copied before the kernels read it, and the strides by which
    they do: the last axis is contiguous, and its stride no parameter of theirs.
    """
    copy = layout[1][-1] != 1 or layout[1][1] > MAX_ROW_STRIDE
    return copy, (contiguous_strides(shape) if copy else layout[1])[:-1]


def present(layout: Layout | None) -> Layout:
    """The layout of an operand that is never absent."""
    assert layout is not None
    return layout


def grid_of(programs: int) -> tuple[int]:
    """A grid of this many programs.

    Raises:
        ValueError: more than a launch can count.
    """
    if programs >= 2**31:
        raise ValueError(f"the kernels serve up to 2**31 - 1 tiles, got {programs}")
    return (programs,)
