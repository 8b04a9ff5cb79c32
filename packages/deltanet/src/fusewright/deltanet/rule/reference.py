"""The gated delta rule in plain torch: token by token, which is the definition, and in chunks of
matrix products, which is the yardstick of the tests and the CPU implementation.

Everything is computed in fp32 (in fp64 for fp64 inputs). q and k are [B, T, H, K], v [B, T, HV, V],
g and beta [B, T, HV], a state [N, HV, K, V]; HV is a multiple of H.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .._core.precision import wide
from ..common.gradients import gradients

Tensor = torch.Tensor

CHUNK = 64
# A decay's coarse part is a multiple of 1 / STEPS, a reset's is RESET: sums of those of a chunk are
# exact in fp32, and exp of one with a reset is 0.
STEPS = 16
RESET = -8192.0


class Chunked(NamedTuple):
    """What the chunked form gives.

    Attributes:
        o: ``[B, T, HV, V]``, in q's dtype.
        end: ``[N, HV, K, V]``, the state after the last token.
        inverses: ``[chunks, HV, C, C]``, (I + A)^-1 of each chunk, one sequence after the other.
        states: ``[chunks, HV, K, V]``, the state at the start of each chunk.
        decays: ``[chunks, HV, 2, C]``, the cumulated log decay of each chunk in two parts, the
            coarse one and the rest; for bf16 and fp16 ``[chunks, HV, C]``, their sum.
    """

    o: Tensor
    end: Tensor
    inverses: Tensor
    states: Tensor
    decays: Tensor


def least_decay(dtype: torch.dtype) -> float:
    """The log decay below which a state vanishes: a reset."""
    return math.log(torch.finfo(dtype).tiny)


def splits_decays(dtype: torch.dtype) -> bool:
    """Whether the kernels keep decays in two parts for q of this dtype. In one sum they lose what
    operands of 16 bits do not have, and two take time.
    """
    return dtype.itemsize > 2


def decays_shape(dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of what is saved of the decays of a chunk and head."""
    return (2, CHUNK) if splits_decays(dtype) else (CHUNK,)


def decay_parts(g: Tensor) -> tuple[Tensor, Tensor]:
    """g as a coarse part, whose sums over a chunk are exact, and a rest, whose sums are small, so
    that differences of sums keep the digits of the decays between. A reset has no rest, and no
    gradient.
    """
    is_reset = g < least_decay(g.dtype)
    coarse = (g * STEPS + 0.5).floor() / STEPS
    return coarse.masked_fill(is_reset, RESET), (g - coarse).masked_fill(is_reset, 0.0)


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token: q, k [.., H, K], v [.., HV, V], g, beta [.., HV], state [.., HV, K, V]."""
    dtype = q.dtype
    q, k, v, g, beta, state = map(wide, (q, k, v, g, beta, state))
    q, k = (x.repeat_interleave(v.shape[-2] // x.shape[-2], -2).unsqueeze(-1) for x in (q, k))
    state = g.exp()[..., None, None] * state
    u = beta.unsqueeze(-1) * (v - (state * k).sum(-2))
    state = state + k * u.unsqueeze(-2)
    return (scale * (state * q).sum(-2)).to(dtype), state


def gated_delta_rule_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """S' = exp(g) S; u = beta (v - S'^T k); S = S' + k u^T; o = scale S^T q, token by token."""

    def sequence(q, k, v, g, beta, state):
        out = [v[:, :0].to(q.dtype)]
        for t in range(q.shape[1]):
            o, state = gated_delta_rule_step(
                q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, scale
            )
            out.append(o.unsqueeze(1))
        return torch.cat(out, 1), state

    o, end = by_sequence(sequence, (q, k, v, g, beta), state, cu_seqlens)
    return o, end


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same by matrix products, one chunk after the other."""
    sequence = functools.partial(chunked, scale=scale, chunk=chunk)
    o, end, *_ = by_sequence(sequence, (q, k, v, g, beta), state, cu_seqlens)
    return o, end


def chunked_rule(*operands: Any) -> Chunked:
    """The same with the saved tensors that its op returns; ``operands``: those of the op."""
    *tensors, state, cu_seqlens, scale = operands
    sequence = functools.partial(chunked, scale=scale, chunk=CHUNK)
    o, end, *saved = by_sequence(sequence, tensors, state, cu_seqlens)
    q, chunks = tensors[0], count_chunks(tensors[0], cu_seqlens)
    inverses, states, decays = (
        F.pad(x, (*(0, 0) * (x.ndim - 1), 0, chunks - x.shape[0])) for x in saved
    )
    return Chunked(o, end, inverses.to(q.dtype), states.to(q.dtype), decays)


def count_chunks(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of chunks of all sequences; where only the device knows their lengths, its upper
    bound.
    """
    batch, tokens = q.shape[:2]
    if cu_seqlens is None:
        return batch * -(-tokens // CHUNK)
    return (tokens + (CHUNK - 1) * (cu_seqlens.numel() - 1)) // CHUNK


def by_sequence(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """``function`` of the rows of a batch, or of the sequences that lie one after the other in the
    only row, whose bounds the host reads.
    """
    q, _, v, *_ = tensors
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if state is None:
        state = wide(q).new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3])
    if cu_seqlens is None:
        return function(*tensors, state)
    read = cu_seqlens.tolist()  # sync: plain torch slices sequences on the host
    # Bounds out of order or range are moved as the kernels move them.
    bounds = list(itertools.accumulate((min(max(x, 0), v.shape[1]) for x in read), max))
    parts = [
        function(*(x[:, first:end] for x in tensors), state[index : index + 1])
        for index, (first, end) in enumerate(itertools.pairwise(bounds))
    ]
    o, *others = zip(*parts, strict=True)
    # Tokens outside all sequences have zeros.
    outside = 0, 0, 0, 0, bounds[0], v.shape[1] - bounds[-1]
    return F.pad(torch.cat(o, 1), outside), *(torch.cat(x) for x in others)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Within a chunk of C tokens, with G the cumulated g, in two parts, and L_ij = exp(G_i - G_j)
    for i >= j:

    A = the part of (beta k) k^T * L below the diagonal,  T = (I + A)^-1
    V' = T (beta v) - T (beta exp(G) k) S
    o = scale ((exp(G) q) S + (q k^T * L) V')
    S <- exp(G_C) S + (exp(G_C - G) k)^T V'
    """
    dtype, (batch, tokens, heads, _) = q.dtype, v.shape
    padding = -tokens % chunk
    count = (tokens + padding) // chunk

    def cut(x: Tensor) -> Tensor:
        """[B, HV, chunks, C, ..]; the padding of the last chunk changes nothing."""
        x = wide(x).repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)
        x = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, padding))
        return x.reshape(batch, heads, count, chunk, *x.shape[3:])

    q, k, v = cut(q), cut(k), cut(v)
    g, beta = cut(g), cut(beta).unsqueeze(-1)
    coarse, rest = (x.cumsum(-1) for x in decay_parts(g))

    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    between, rest_between = (x.unsqueeze(-1) - x.unsqueeze(-2) for x in (coarse, rest))
    # Above the diagonal exp may overflow: the mask comes first.
    between = (between + rest_between).masked_fill(~lower, -math.inf).exp()
    from_start = (coarse + rest).exp().unsqueeze(-1)
    to_end = (coarse[..., -1:] - coarse) + (rest[..., -1:] - rest)
    to_end = to_end.exp().unsqueeze(-1)

    identity = torch.eye(chunk, dtype=q.dtype, device=q.device)
    a = ((beta * k) @ k.mT * between).tril(-1)
    inverses = torch.linalg.solve_triangular(
        identity + a, identity.expand_as(a), upper=False, unitriangular=True
    )
    values, w = inverses @ (beta * v), inverses @ (beta * from_start * k)
    weights, q, k = (q @ k.mT) * between, q * from_start, k * to_end
    states, out = [], [v[:, :, 0:0].flatten(2, 3)]
    for c in range(count):
        states.append(state)
        new_values = values[:, :, c] - w[:, :, c] @ state
        out.append(q[:, :, c] @ state + weights[:, :, c] @ new_values)
        decayed = from_start[:, :, c, -1:] * state
        state = decayed + k[:, :, c].mT @ new_values
    o = (scale * torch.cat(out, 2)[:, :, :tokens]).transpose(1, 2).to(dtype).contiguous()
    starts = torch.stack(states, 2) if states else state.unsqueeze(2)[:, :, :0]
    if not states:
        # An op must not return its own operand.
        state = state.clone()

    def of_chunks(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    state = state.contiguous()
    if splits_decays(dtype):
        saved = torch.stack((coarse, rest), -2)
    else:
        saved = g.clamp(min=least_decay(g.dtype)).cumsum(-1)
    return o, state, of_chunks(inverses), of_chunks(starts), of_chunks(saved)


def rule_backward(do: Tensor, dend: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and the state; ``operands``: these, cu_seqlens, what the
    forward pass has saved, which is not read, and the scale.
    """
    inputs, (cu_seqlens, *_, scale) = operands[:6], operands[6:]

    forward: Any = functools.partial(gated_delta_rule, cu_seqlens=cu_seqlens, scale=scale)
    return gradients(forward, inputs, (do, dend), like=inputs[3])
