"""The launches of the gradients of reading streams and of writing to them, and their plans.

Streams are ``[N, n, C]`` in fp32, contiguous, as is every other operand. Each program that loops
over tokens writes a partial sum; these are added in a fixed order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import Allocator, Launch, Plan, allocator, cdiv
from .._core.lazy import lazy_module
from .launch import F32, Tile, block_columns, parts_of, plan_launch, tiles_of

if TYPE_CHECKING:
    from . import kernels_backward as kernels
else:
    kernels = lazy_module(__package__, "kernels_backward")

Tensor = torch.Tensor


class ReadBackwardPlan(NamedTuple):
    """The launch of the gates' gradients and that of the streams', both None without tokens; the
    memory of dx, of dm and pull, which the first leaves to the second, and of the partial sums over
    tokens of the gates' gradients and of dPhi.
    """

    gates: Launch | None
    streams: Launch | None
    memory: tuple[Allocator, ...]


def walkers(tile: Tile, tokens: int, beside: int, device: torch.device) -> int:
    """How many programs loop over the tokens, where ``beside`` of them take each block."""
    there = tile.programs * device_properties(device).multiprocessors
    return max(1, min(cdiv(tokens, tile.tokens), there // beside))


def stream_write_backward(
    g: Tensor, x: Tensor, res: Tensor, post: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, res, post and y."""
    return write_backward_plan(x.shape, y.dtype, x.device).run((g, x, res, post, y))


@functools.lru_cache(maxsize=4096)
def write_backward_plan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for streams of this shape, with y in this dtype."""
    tokens, n, width = shape
    tile = tiles_of(n).write_backward
    grid = (cdiv(tokens, tile.tokens),)
    launch = plan_launch(kernels.stream_write_backward_kernel, grid, shape, tile, device, n=n)
    outputs = (
        *(allocator(each, F32, device) for each in (shape, (tokens, n, n), (tokens, n))),
        allocator((tokens, width), dtype, device),
    )
    return Plan(launch, (), outputs)


def stream_read_backward(
    du: Tensor,
    dpost: Tensor,
    dlogits: Tensor,
    dmixed: Tensor | None,
    dorigin: Tensor | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    s_hat: Tensor,
    scale: Tensor,
    negated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, Phi, alpha and b.

    Args:
        du, dpost, dlogits: of what ``stream_read`` returns.
        dmixed, dorigin: of the streams that it returns, the latter's negative if ``negated``.
        x, phi, alpha, bias, s_hat, scale: what ``stream_read`` took and saved.
    """
    arrived = dmixed is not None, dorigin is not None, negated
    plan = read_backward_plan(x.shape, du.dtype, arrived, x.device)
    memory: tuple[Tensor, ...] = ()
    # No comprehension, whose call takes the host longer.
    for allocate in plan.memory:
        memory += (allocate(),)
    dx, dm, pull, of_gates, of_phi = memory
    if plan.gates is None or plan.streams is None:
        return dx, torch.zeros_like(phi), torch.zeros_like(alpha), torch.zeros_like(bias)
    plan.gates((du, dpost, dlogits, x, s_hat, scale, alpha, bias, dm, pull, of_gates))
    plan.streams((du, x, s_hat, dm, pull, phi, alpha, bias, dmixed, dorigin, dx, of_phi))
    dbias, dalpha = of_gates.sum(0).split([len(bias), 3])
    # A result of an op is no view of another.
    return dx, of_phi.sum(0), dalpha.clone(), dbias.clone()


@functools.lru_cache(maxsize=4096)
def read_backward_plan(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    arrived: tuple[bool, bool, bool],
    device: torch.device,
) -> ReadBackwardPlan:
    """The plan for streams of this shape, with u in this dtype; ``arrived``: whether
    dmixed and dorigin are given, and whether the latter is its negative.
    """
    tokens, n, width = shape
    parts, tiles = n * (n + 2), tiles_of(n)
    *_, negated = arrived
    gate_programs = walkers(tiles.gates_backward, tokens, 1, device)
    gates = plan_launch(
        kernels.stream_gates_backward_kernel,
        (gate_programs,),
        shape,
        tiles.gates_backward,
        device,
        **parts_of(n),
    )
    tile = tiles.read_backward
    beside = n * cdiv(width, block_columns(tile, width))
    programs = walkers(tile, tokens, beside, device)
    streams = plan_launch(
        *(kernels.stream_read_backward_kernel, (beside, programs), shape, tile, device),
        n=n,
        NEGATED=negated,
        PARTS=parts_of(n)["PARTS"],
    )
    shapes = (
        shape,
        (tokens, parts),
        (tokens,),
        (gate_programs, parts + 3),
        (programs, parts, n * width),
    )
    return ReadBackwardPlan(gates, streams, tuple(allocator(each, F32, device) for each in shapes))
