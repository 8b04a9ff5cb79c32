"""The launches around a layer on residual streams, and how many tokens a program takes.

Streams are ``[N, n, C]`` in fp32, contiguous, as is everything else that is given. Sums over tokens
are made in shares, one for each program that walks over tokens, and added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ._stream_backward_kernels import (
    _gates_backward_kernel,
    _read_backward_kernel,
    _write_backward_kernel,
)
from ._stream_kernels import _read_kernel, _write_kernel

Tensor = torch.Tensor

EPS = 1e-6
# Where there is no card: a small one, on which several programs run.
FEW = 2


class Tile(NamedTuple):
    """One program takes ``tokens``, ``columns`` of each at a time; one that walks over tokens
    shares a multiprocessor with others, ``programs`` in all.
    """

    tokens: int
    columns: int
    warps: int
    stages: int = 1
    programs: int = 0


class Tiles(NamedTuple):
    """Of each launch, for up to so many streams."""

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
    padded = triton.next_power_of_2(streams * (streams + 2))
    return dict(n=streams, PARTS=max(16, padded))


def block_of(tile: Tile, columns: int) -> dict[str, int]:
    """The constants and options of a launch that has so many columns to take."""
    return dict(
        BLOCK=tile.tokens,
        BLOCK_C=min(tile.columns, max(16, triton.next_power_of_2(columns))),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def walkers(tile: Tile, tokens: int, beside: int, device: torch.device) -> int:
    """How many programs walk over the tokens where so many walk beside each."""
    cards = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    there = tile.programs * (cards.multi_processor_count if cards else FEW)
    return max(1, min(triton.cdiv(tokens, tile.tokens), there // beside))


def launch_read(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """u ``[N, C]`` in a dtype, post ``[N, n]``, s of res ``[N, n, n]``; for the backward pass s_hat
    of all gates, ``[N, n (n + 2)]``, and 1 / rms(v), ``[N]``.
    """
    tokens, n, C = x.shape
    u = x.new_empty(tokens, C, dtype=dtype)
    post, logits = x.new_empty(tokens, n), x.new_empty(tokens, n, n)
    s_hat, scale = x.new_empty(tokens, len(bias)), x.new_empty(tokens)
    if x.numel():
        tile = tiles_of(n).read
        with torch.cuda.device_of(x):
            _read_kernel[(triton.cdiv(tokens, tile.tokens),)](
                *(x, phi, alpha, bias, u, post, logits, s_hat, scale),
                *(tokens, C, EPS),
                **parts_of(n),
                **block_of(tile, C),
            )
    return u, post, logits, s_hat, scale


def launch_write(x: Tensor, res: Tensor, post: Tensor, y: Tensor, origin: Tensor | None) -> Tensor:
    """res x + post y, ``[N, n, C]``, less the origin if there is one."""
    tokens, n, C = x.shape
    new = torch.empty_like(x)
    if x.numel():
        tile = tiles_of(n).write
        block = block_of(tile, C)
        grid = triton.cdiv(tokens, tile.tokens), triton.cdiv(C, block["BLOCK_C"])
        with torch.cuda.device_of(x):
            _write_kernel[grid](
                *(x, res, post, y, origin, new),
                *(tokens, C),
                n=n,
                HAS_ORIGIN=origin is not None,
                **block,
            )
    return new


def launch_write_backward(
    g: Tensor, x: Tensor, res: Tensor, post: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, res, post and y."""
    tokens, n, C = x.shape
    dx, dres, dpost, dy = (torch.empty_like(t) for t in (x, res, post, y))
    if x.numel():
        tile = tiles_of(n).write_backward
        with torch.cuda.device_of(x):
            _write_backward_kernel[(triton.cdiv(tokens, tile.tokens),)](
                *(g, x, res, post, y, dx, dres, dpost, dy),
                *(tokens, C),
                n=n,
                **block_of(tile, C),
            )
    return dx, dres, dpost, dy


def launch_read_backward(
    du: Tensor,
    dpost: Tensor,
    dlogits: Tensor,
    dmixed: Tensor | None,
    dorigin: Tensor | None,
    negated: bool,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    s_hat: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, Phi, alpha and b.

    Args:
        du, dpost, dlogits: of what `launch_read` returns.
        dmixed, dorigin: of the streams that are handed on, the latter's negative if ``negated``.
        x, phi, alpha, bias, s_hat, scale: as above.
    """
    tokens, n, C = x.shape
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(phi), torch.zeros_like(alpha), torch.zeros_like(bias)
    tiles, parts = tiles_of(n), len(bias)
    dm, pull = torch.empty_like(s_hat), torch.empty_like(scale)
    with torch.cuda.device_of(x):
        tile = tiles.gates_backward
        programs = walkers(tile, tokens, 1, x.device)
        of_gates = x.new_empty(programs, parts + 3)
        _gates_backward_kernel[(programs,)](
            *(du, dpost, dlogits, x, s_hat, scale, alpha, bias, dm, pull, of_gates),
            *(tokens, C),
            **parts_of(n),
            **block_of(tile, C),
        )
        tile = tiles.read_backward
        block = block_of(tile, C)
        beside = n * triton.cdiv(C, block["BLOCK_C"])
        programs = walkers(tile, tokens, beside, x.device)
        of_phi = x.new_empty(programs, *phi.shape)
        _read_backward_kernel[(beside, programs)](
            *(du, x, s_hat, dm, pull, phi, alpha, bias, dmixed, dorigin, dx, of_phi),
            *(tokens, C),
            HAS_MIXED=dmixed is not None,
            HAS_ORIGIN=dorigin is not None,
            NEGATED=negated,
            **parts_of(n),
            **block,
        )
    dbias, dalpha = of_gates.sum(0).split([parts, 3])
    # A result of an op is no view of another.
    return dx, of_phi.sum(0), dalpha.clone(), dbias.clone()
