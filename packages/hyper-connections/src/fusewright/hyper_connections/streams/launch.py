"""The launches of reading streams and of writing to them: their tiles and their plans.

Streams are ``[N, n, C]`` in fp32, contiguous, as is everything else that is given.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import Launch, Plan, allocator, cdiv
from .._core.lazy import lazy_module
from .._core.precision import power_of_2

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor

F32 = torch.float32


class Tile(NamedTuple):
    """One program takes ``tokens``, ``columns`` of each at a time; where programs loop over tokens,
    ``programs`` of them run on a multiprocessor.
    """

    tokens: int
    columns: int
    warps: int
    stages: int = 1
    programs: int = 0


class Tiles(NamedTuple):
    """Of each launch, for up to this many streams."""

    streams: int
    read: Tile
    write: Tile
    write_backward: Tile
    gates_backward: Tile
    read_backward: Tile


# Measured is the reading of four streams (docs/decisions/0015), which has no registers to spare for
# fewer. The others are as they were first written.
UP_TO_THREE = Tiles(
    streams=3,
    read=Tile(64, 32, warps=4, stages=3),
    write=Tile(1, 512, warps=1),
    write_backward=Tile(1, 512, warps=1),
    gates_backward=Tile(1, 512, warps=1, programs=16),
    read_backward=Tile(32, 64, warps=4, stages=2, programs=2),
)
TILES = (
    UP_TO_THREE,
    UP_TO_THREE._replace(streams=4, read=Tile(64, 64, warps=4, stages=3)),
    Tiles(
        streams=8,
        read=Tile(32, 32, warps=8, stages=2),
        write=Tile(1, 256, warps=1),
        write_backward=Tile(1, 128, warps=1),
        gates_backward=Tile(1, 256, warps=1, programs=16),
        read_backward=Tile(16, 32, warps=8, stages=2, programs=2),
    ),
)


def tiles_of(streams: int) -> Tiles:
    return next(tiles for tiles in TILES if streams <= tiles.streams)


def parts_of(streams: int) -> dict[str, int]:
    """The constants of a kernel that computes with gates: products have 16 columns at least."""
    return dict(n=streams, PARTS=max(16, power_of_2(streams * (streams + 2))))


def block_columns(tile: Tile, columns: int) -> int:
    """How many of this many columns a program takes at a time."""
    return min(tile.columns, max(16, power_of_2(columns)))


def plan_launch(
    kernel: Any,
    grid: tuple[int, ...],
    shape: tuple[int, ...],
    tile: Tile,
    device: torch.device,
    *numbers: Any,
    **constants: int,
) -> Launch | None:
    """The launch for streams of this shape, in this tile; None where there are none. The kernel
    takes ``numbers`` behind the sizes.
    """
    if not math.prod(shape):
        return None
    tokens, _, width = shape
    return Launch(
        kernel,
        grid,
        device,
        (tokens, width, *numbers),
        dict(num_warps=tile.warps, num_stages=tile.stages),
        **constants,
        BLOCK=tile.tokens,
        BLOCK_C=block_columns(tile, width),
    )


def stream_read(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """u ``[N, C]`` in a dtype, post ``[N, n]``, s of res ``[N, n, n]``; for the backward pass s_hat
    of all gates, ``[N, n (n + 2)]``, and 1 / rms(v), ``[N]``.
    """
    return read_plan(x.shape, eps, dtype, x.device).run((x, phi, alpha, bias))


@functools.lru_cache(maxsize=4096)
def read_plan(shape: tuple[int, ...], eps: float, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for streams of this shape, with u in this dtype."""
    tokens, n, width = shape
    tile = tiles_of(n).read
    # A plan is for one eps.
    grid = (cdiv(tokens, tile.tokens),)
    launch = plan_launch(kernels.stream_read_kernel, grid, shape, tile, device, eps, **parts_of(n))
    shapes = (tokens, n), (tokens, n, n), (tokens, n * (n + 2)), (tokens,)
    outputs = (
        allocator((tokens, width), dtype, device),
        *(allocator(shape, F32, device) for shape in shapes),
    )
    return Plan(launch, (), outputs)


def stream_write(x: Tensor, res: Tensor, post: Tensor, y: Tensor, origin: Tensor | None) -> Tensor:
    """res x + post y, ``[N, n, C]``, less the origin if there is one."""
    plan = write_plan(x.shape, y.dtype, origin is not None, x.device)
    return plan.run((x, res, post, y, origin))[0]


@functools.lru_cache(maxsize=4096)
def write_plan(
    shape: tuple[int, ...], dtype: torch.dtype, has_origin: bool, device: torch.device
) -> Plan:
    """The plan for streams of this shape, with y in this dtype."""
    tokens, n, width = shape
    tile = tiles_of(n).write
    grid = cdiv(tokens, tile.tokens), cdiv(width, block_columns(tile, width))
    launch = plan_launch(kernels.stream_write_kernel, grid, shape, tile, device, n=n)
    return Plan(launch, (), (allocator(shape, F32, device),))
