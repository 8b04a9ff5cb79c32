"""The scan over tokens in plain torch, for a memory of any number of layers: token by token, which
is the specification, and in chunks of matrix products, which is the yardstick of the tests and the
CPU implementation.

Everything is computed in fp32 (in fp64 for fp64 inputs). Here q, k, v are [*lead, T, D], the gates
and ``written`` [*lead, T]: the public function moves the heads to the front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .._core.precision import wide
from ..common.reference import (
    ACTIVATIONS,
    Rows,
    gradients_of,
    layers_of,
    linear,
    memory_read,
    over,
    rows_of,
)
from ..common.weights import MemoryWeights, Weights, mapped, packed_copy, views

Tensor = torch.Tensor

# The gradient of |M(k) - v|^2 by M(k) is this times the residual.
FACTOR = 2.0


def memory_scan_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None = None,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    max_grad_norm: float | None = None,
) -> tuple[Tensor, Weights, Weights, Tensor | None]:
    """S = eta S - theta G; W = (1 - alpha) W + S, for one token after the other; G is the gradient
    at the weights with which the token's chunk began.

    With ``max_grad_norm`` G is scaled down to that norm, and to 0 where its norm is not finite, and
    a chunk after which W or S is not finite leaves both as it found them. The last result is how
    many tokens ``[*lead]`` were lost to either; None without it.
    """
    if written is not None:
        k, v = (torch.where(written.unsqueeze(-1), x, 0.0) for x in (k, v))
        alpha, eta, theta = (torch.where(written, gate, 0.0) for gate in (alpha, eta, theta))
    out, start = [], (weights, momentum)
    factors: list[Tensor] = []
    lost = None if max_grad_norm is None else k.new_zeros(k.shape[:-2], dtype=torch.int64)
    for t in range(k.shape[-2]):
        if t % chunk == 0:
            start, factors = (weights, momentum), []
        row = slice(t, t + 1)
        if read == "before":
            out.append(memory_read(q[..., row, :], weights, activation=activation))
        own = None if written is None else written[..., row]
        token = k[..., row, :], v[..., row, :]
        if max_grad_norm is None:
            rows = rows_of(*token, None, start[0], FACTOR, activation)
        else:
            rows, factor = clipped_rows(*token, own, start[0], activation, max_grad_norm)
            factors.append(factor)
        new_momentum = mapped(
            lambda s, g, t=t: over(eta[..., t], s) * s - over(theta[..., t], g) * g,
            momentum,
            gradients_of(rows, weights),
        )
        new_weights = mapped(
            lambda w, s, t=t: over(1.0 - alpha[..., t], w) * w + s, weights, new_momentum
        )
        if written is not None:
            new_momentum, new_weights = (
                mapped(lambda x, y, t=t: torch.where(over(written[..., t], x), x, y), new, old)
                for new, old in ((new_momentum, momentum), (new_weights, weights))
            )
        weights, momentum = new_weights, new_momentum
        if read == "after":
            out.append(memory_read(q[..., row, :], weights, activation=activation))
        if lost is not None and t + 1 in (t // chunk * chunk + chunk, k.shape[-2]):
            taken = are_finite(weights, momentum)
            part = None if written is None else written[..., t + 1 - len(factors) : t + 1]
            lost = lost + lost_tokens(torch.cat(factors, -1), taken.unsqueeze(-1), part)
            weights, momentum = (
                kept_where(taken, *pair) for pair in zip((weights, momentum), start, strict=True)
            )
    return torch.cat(out, -2) if out else q, weights, momentum, lost


def clipped_rows(
    k: Tensor,
    v: Tensor,
    written: Tensor | None,
    weights: Weights,
    activation: str,
    max_grad_norm: float,
) -> tuple[Rows, Tensor]:
    """``rows_of`` with each row's gradients by the layers, ``by_z``, scaled to the norm
    ``max_grad_norm`` of the row's gradient over all tensors of the memory, where it is larger; and
    by what, ``[.., N]``. Of a row whose norm is not finite nothing is left: a factor of 0.
    """
    with torch.no_grad():
        unchecked = rows_of(k, v, None, weights, FACTOR, activation)
        norm = norms_of(unchecked)
        clipped = norm > max_grad_norm
        if written is not None:
            clipped = clipped & written
        factors = torch.where(clipped, max_grad_norm / norm, 1.0)
        finite = norm.isfinite() & (factors > 0.0)
        # The gradient of a row of nothing is no row's: autograd would multiply it by 0.
        lost = ~finite if written is None else ~finite & written
        clipped, factors = clipped & finite, torch.where(lost, 0.0, factors)
        size = unchecked.by_z[-1].abs().amax(-1)
        size = torch.where(clipped & (size > 0.0), size, 1.0)
    k, v = (torch.where(finite.unsqueeze(-1), x, 0.0) for x in (k, v))
    # A clipped gradient is the same whatever it is multiplied by before. So each begins with a size
    # of 1, and its norm, over its own value, is 1: no derivative has the square of an outlier.
    rows = rows_of(k, v, 1.0 / size, weights, FACTOR, activation)
    norm = torch.where(clipped, norms_of(rows), 1.0)
    value = norm.detach()
    scale = torch.where(clipped, max_grad_norm / value / (norm / value), (~lost).to(norm.dtype))
    return rows._replace(by_z=[scale.unsqueeze(-1) * p for p in rows.by_z]), factors


def norms_of(rows: Rows) -> Tensor:
    """The norm of every row's gradient over all tensors of a memory: of layer l it is |p_l| times
    that of (x_(l-1), 1), the one being the bias.
    """
    layers = zip(rows.inputs, rows.by_z, strict=True)
    parts = [length(p) * length(F.pad(x, (0, 1), value=1.0)) for x, p in layers]
    return length(torch.stack(parts, -1))


def length(x: Tensor) -> Tensor:
    """The norm over the last axis: the squares do not overflow, and the derivative at 0 is 0."""
    largest = x.detach().abs().amax(-1)
    largest = torch.where(largest > 0.0, largest, 1.0)
    squares = (x / largest.unsqueeze(-1)).square().sum(-1)
    some = squares != 0.0
    return largest * torch.where(some, torch.where(some, squares, 1.0).sqrt(), 0.0)


def are_finite(weights: Weights, momentum: Weights) -> Tensor:
    """``[*lead]``: whether all numbers of a memory are."""
    lead = weights[1].ndim - 1
    parts = [x.detach().isfinite().flatten(lead).all(-1) for x in (*weights, *momentum)]
    return torch.stack(parts).all(0)


def kept_where(taken: Tensor, new: Weights, old: Weights) -> Weights:
    """``new`` for the memories that ``taken [*lead]`` names, ``old`` for the others."""
    return mapped(lambda x, y: torch.where(over(taken, x), x, y), new, old)


def lost_tokens(factors: Tensor, taken: Tensor, written: Tensor | None) -> Tensor:
    """``[*lead]``: how many of the tokens that were to be written have a factor of 0, or a chunk
    that was not taken; all ``[*lead, N]``.
    """
    lost = (factors == 0.0) | ~taken
    return (lost if written is None else lost & written).sum(-1)


class Decays(NamedTuple):
    """The factors that the gates of a chunk of C tokens give to the weights W and the momentum S
    with which the chunk began, and to the gradient G_j of every token j:

        W_t = keep_t W + carry_t S - sum_{j <= t} gamma_tj G_j
        S_t = decay_t S - sum_{j <= t} nu_tj G_j

    Attributes:
        gamma, nu: ``[.., C, C]``, lower triangles.
        keep, carry, decay: ``[.., C]``.
    """

    gamma: Tensor
    nu: Tensor
    keep: Tensor
    carry: Tensor
    decay: Tensor


def decays_of(alpha: Tensor, eta: Tensor, theta: Tensor, written: Tensor | None = None) -> Decays:
    """Products of gates, taken as products, so that gates of exactly 0 and 1 are right. A token
    that is not written leaves both rows as they were.
    """
    if written is not None:
        alpha, eta, theta = (
            torch.where(written, gate, neutral)
            for gate, neutral in ((alpha, 0.0), (eta, 1.0), (theta, 0.0))
        )
    kept = products_since(1.0 - alpha)
    if written is not None:
        kept = kept * written.unsqueeze(-2)
    nu = products_since(eta) * theta.unsqueeze(-2)
    decay = cumulated_product(eta, -1)
    carry = (kept @ decay.unsqueeze(-1)).squeeze(-1)
    return Decays(kept @ nu, nu, cumulated_product(1.0 - alpha, -1), carry, decay)


def cumulated_product(x: Tensor, dim: int) -> Tensor:
    """x.cumprod(dim). On a GPU by doubling: the backward pass of torch's own has the host wait to
    learn whether a factor is zero.
    """
    if x.is_cpu:
        return x.cumprod(dim)
    step = 1
    while step < x.shape[dim]:
        left = x.shape[dim] - step
        later = x.narrow(dim, step, left) * x.narrow(dim, 0, left)
        x = torch.cat((x.narrow(dim, 0, step), later), dim)
        step *= 2
    return x


def products_since(factors: Tensor) -> Tensor:
    """[.., t, i]: the product of the factors i + 1 to t, 0 for t < i."""
    size = factors.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=factors.device).tril()
    later = cumulated_product(torch.where(lower.tril(-1), factors.unsqueeze(-1), 1.0), -2)
    return torch.where(lower, later, 0.0)


def memory_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None = None,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    max_grad_norm: float | None = None,
) -> tuple[Tensor, Weights, Weights, Tensor | None]:
    """The same by matrix products, one chunk after the other: every G_j is an outer product, so no
    token needs weights of its own.
    """
    gates = alpha, eta, theta
    y, states, factors, taken = chunk_by_chunk(
        q, k, v, weights, momentum, gates, written, chunk, activation, read, max_grad_norm
    )
    if max_grad_norm is None:
        return y, *states[-1], None
    return y, *states[-1], lost_tokens(factors, of_tokens(taken, chunk, factors), written)


def of_tokens(taken: Tensor, chunk: int, tokens: Tensor) -> Tensor:
    """``taken [*lead, chunks]`` for every token of ``tokens [*lead, N]``."""
    # No longer than all tokens, of which there may be none.
    chunk = min(chunk, max(tokens.shape[-1], 1))
    return taken.unsqueeze(-1).expand(*taken.shape, chunk).flatten(-2)[..., : tokens.shape[-1]]


def chunk_by_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Weights,
    momentum: Weights,
    gates: Sequence[Tensor],
    written: Tensor | None,
    chunk: int,
    activation: str,
    read: str,
    max_grad_norm: float | None = None,
) -> tuple[Tensor, list[tuple[Weights, Weights]], Tensor, Tensor]:
    """y, and weights and momentum at the start of every chunk and after the last. With
    ``max_grad_norm`` the factors of the tokens' gradients ``[*lead, T]``, and which chunks were
    taken ``[*lead, chunks]``; nothing without.
    """
    lead = q.shape[:-2]
    # One batch of matrices, laid out for the products: each of them would copy it.
    q, k, v = (x.reshape(math.prod(lead), *x.shape[-2:]) for x in (q, k, v))
    weights, momentum = (
        mapped(lambda x: x.reshape(len(q), *x.shape[len(lead) :]), half)
        for half in (weights, momentum)
    )
    numbers = [*gates] if written is None else [*gates, written]
    numbers = [x.reshape(q.shape[:2]) for x in numbers]
    if written is not None:
        k, v = (torch.where(numbers[-1].unsqueeze(-1), x, 0.0) for x in (k, v))
    out, states = [q[:, :0]], [(weights, momentum)]
    factors, taken = [q[:, :0, 0]], [q[:, :0, 0].bool()]
    # Tensors without tokens would split into one part.
    parts = [x.split(chunk, 1) for x in (q, k, v, *numbers)] if q.shape[1] else []
    for part in zip(*parts, strict=True):
        q_part, k_part, v_part = part[:3]
        if max_grad_norm is None:
            decays = decays_of(*part[3:])
            rows = rows_of(k_part, v_part, None, weights, FACTOR, activation)
            out.append(reads_of(q_part, rows, weights, momentum, decays, activation, read))
            weights, momentum = chunk_end(rows, weights, momentum, decays)
        else:
            options = activation, read, max_grad_norm
            y, weights, momentum, *found = guarded_chunk(*part, weights, momentum, *options)
            out.append(y)
            factors.append(found[0])
            taken.append(found[1])
        states.append((weights, momentum))

    def unflat(x: Tensor) -> Tensor:
        return x.reshape(*lead, *x.shape[1:])

    return (
        unflat(torch.cat(out, 1)),
        [(mapped(unflat, weights), mapped(unflat, momentum)) for weights, momentum in states],
        unflat(torch.cat(factors, 1)),
        unflat(torch.cat(taken, 1)),
    )


def reads_of(
    q: Tensor,
    rows: Rows,
    weights: Weights,
    momentum: Weights,
    decays: Decays,
    activation: str,
    read: str,
) -> Tensor:
    """What the queries of one chunk read.

    Layer l of the memory that token t reads, with its inputs x_t and x_j of query t and key j:

        keep_t (w_l x_t + b_l) + carry_t (s_l x_t + c_l) - sum_j gamma_tj (x_t x_j + 1) p_j
    """
    seen, keep, carry = -decays.gamma, decays.keep, decays.carry
    if read == "before":
        # Every query reads what the token before it has left.
        seen = F.pad(seen, (0, 0, 1, 0))[..., :-1, :]
        keep, carry = F.pad(keep, (1, 0), value=1.0)[..., :-1], F.pad(carry, (1, 0))[..., :-1]
    x = q
    layers = zip(layers_of(weights), layers_of(momentum), rows.inputs, rows.by_z, strict=True)
    for layer, (old, moving, keys, p) in enumerate(layers):
        if layer:
            x = ACTIVATIONS[activation](x)
        kept = keep.unsqueeze(-1) * linear(x, *old)
        carried = torch.addcmul(kept, carry.unsqueeze(-1), linear(x, *moving))
        # seen * (x keys^T + 1)
        x = torch.baddbmm(carried, torch.addcmul(seen, seen, x @ keys.mT), p)
    return x


def chunk_end(
    rows: Rows, weights: Weights, momentum: Weights, decays: Decays
) -> tuple[Weights, Weights]:
    """Weights and momentum after the chunk's last token."""
    keep, carry, decay = decays.keep[..., -1], decays.carry[..., -1], decays.decay[..., -1]
    return (
        mapped(
            lambda w, s, g: torch.addcmul(over(keep, w) * w, over(carry, s), s) - g,
            weights,
            momentum,
            gradients_of(rows, weights, decays.gamma[..., -1, :]),
        ),
        mapped(
            lambda s, g: over(decay, s) * s - g,
            momentum,
            gradients_of(rows, weights, decays.nu[..., -1, :]),
        ),
    )


def guarded_chunk(
    *arguments: Any,
) -> tuple[Tensor, Weights, Weights, Tensor, Tensor]:
    """One chunk with a clip. Where the memory is not finite after it, it stays as it was, as if no
    token were written, and no gradient passes through the chunk's reads, which are of what its
    tokens wrote.

    Args:
        arguments: q, k, v, the gates, and which tokens are written where some are not; weights and
            momentum; activation, read and the largest norm.

    Returns:
        (y, weights and momentum after the chunk, the factors of its tokens' gradients ``[N, C]``,
        whether it was taken ``[N, 1]``).
    """
    q, k, v, *numbers, weights, momentum, activation, read, max_grad_norm = arguments
    alpha, eta, theta = numbers[:3]
    written = numbers[3] if len(numbers) > 3 else torch.ones_like(k[..., 0], dtype=torch.bool)

    def chunk(written: Tensor) -> tuple[Tensor, Weights, Weights, Tensor]:
        decays = decays_of(alpha, eta, theta, written)
        own_k, own_v = (torch.where(written.unsqueeze(-1), x, 0.0) for x in (k, v))
        rows, factors = clipped_rows(own_k, own_v, written, weights, activation, max_grad_norm)
        y = reads_of(q, rows, weights, momentum, decays, activation, read)
        return y, *chunk_end(rows, weights, momentum, decays), factors

    with torch.no_grad():
        y, *ends, factors = chunk(written)
        taken = are_finite(*ends)
    # Again, with nothing that is not finite among the numbers that autograd multiplies by zeros.
    seen, *ends, _ = chunk(written & taken.unsqueeze(-1))
    weights, momentum = (
        kept_where(taken, *pair) for pair in zip(ends, (weights, momentum), strict=True)
    )
    return (
        torch.where(over(taken, y), seen, y),
        weights,
        momentum,
        factors,
        taken.unsqueeze(-1),
    )


def packed_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan as its op sees it: q, k, v [B, T, heads, D], gates and ``written`` [B, T, heads],
    weights and momentum packed [B, heads, 2, SIZE].

    Returns:
        (y, the packed state after the last token, the states with which the chunks began
        [chunks, B, heads, 2, SIZE], none of them without ``starts``).
    """
    operands = q, k, v, state, alpha, eta, theta, written
    return packed_chunks(*operands, hidden, chunk, activation, read, None, starts)[:3]


def packed_clipped_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    max_grad_norm: float,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with a clip.

    Returns:
        (y, the packed state after the last token, the states with which the chunks began, the
        factors of the tokens' gradients [B, T, heads], which chunks were taken [B, chunks, heads]).
    """
    operands = q, k, v, state, alpha, eta, theta, written
    return packed_chunks(*operands, hidden, chunk, activation, read, max_grad_norm, starts)


def packed_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    max_grad_norm: float | None,
    starts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
    weights, momentum = views(state, hidden, q.shape[-1])
    gates = [gate.mT for gate in (alpha, eta, theta)]
    mask = None if written is None else written.mT
    y, states, factors, taken = chunk_by_chunk(
        q, k, v, weights, momentum, gates, mask, chunk, activation, read, max_grad_norm
    )
    wanted = states if starts else states[-1:]
    *begins, end = [packed_copy(MemoryWeights(*w), MemoryWeights(*s)) for w, s in wanted]
    began = torch.stack(begins) if begins else state.new_empty(0, *state.shape)
    y = y.transpose(1, 2).to(dtype).contiguous()
    return y, end, began, factors.mT.detach().contiguous(), taken.mT.contiguous()


def packed_scan_backward(
    dy: Tensor,
    dend: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    max_grad_norm: float | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta), chunk by chunk from the last one, each
    recomputed from the state with which it began.
    """
    options = hidden, chunk, activation, read, max_grad_norm
    states = packed_chunks(q, k, v, state, alpha, eta, theta, written, *options, True)[2]
    rows: list[tuple[Tensor, ...]] = []
    for index in reversed(range(len(states))):
        part = slice(index * chunk, (index + 1) * chunk)
        mask = None if written is None else written[:, part]

        def step(q, k, v, state, alpha, eta, theta, mask=mask):
            tensors = q, k, v, state, alpha, eta, theta, mask
            return packed_chunks(*tensors, *options, False)[:2]

        pullback = torch.func.vjp(
            step,
            *(wide(x[:, part]) for x in (q, k, v)),
            states[index],
            *(x[:, part] for x in (alpha, eta, theta)),
        )[1]
        dq, dk, dv, dend, *dgates = pullback((wide(dy[:, part]), dend))
        rows.append((dq, dk, dv, *dgates))
    if not rows:
        return (
            *(torch.zeros_like(x) for x in (q, k, v)),
            dend.clone(),
            *map(torch.zeros_like, (alpha, eta, theta)),
        )
    dq, dk, dv, *dgates = (torch.cat(parts[::-1], 1) for parts in zip(*rows, strict=True))
    return *(x.to(q.dtype) for x in (dq, dk, dv)), dend, *dgates
