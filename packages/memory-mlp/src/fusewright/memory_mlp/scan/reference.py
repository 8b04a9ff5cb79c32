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

from ..common.reference import (
    ACTIVATIONS,
    Rows,
    gradients_of,
    layers_of,
    linear,
    memory_read,
    normalised,
    over,
    rows_of,
)
from ..common.weights import Weights, mapped
from .reference_clip import FACTOR, are_finite, clipped_rows, kept_where, lost_tokens

Tensor = torch.Tensor


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
    rest: Weights | None = None,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    residual_norm: bool = False,
    max_grad_norm: float | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Weights, Weights, Tensor | None, Tensor]:
    """S = eta S - theta G; W = (1 - alpha) W + alpha rest + S, for one token after the other; G is
    the gradient at the weights with which the token's chunk began. Without ``rest``
    [heads, ..] W is forgotten towards zero.

    With ``max_grad_norm`` G is scaled down to that norm, and to 0 where its norm is not finite, and
    a chunk after which W or S is not finite leaves both as it found them. After y, W and S the
    result is how many tokens ``[*lead]`` were lost to either, None without it, and the inner loss
    of each token ``[*lead, T]``. Chunks where ``resets [*lead, chunks]`` is True begin with
    ``weights`` and ``momentum`` again.
    """
    first = weights, momentum
    if written is not None:
        k, v = (torch.where(written.unsqueeze(-1), x, 0.0) for x in (k, v))
        alpha, eta, theta = (torch.where(written, gate, 0.0) for gate in (alpha, eta, theta))
    form: dict[str, Any] = {"activation": activation, "residual_norm": residual_norm}
    zero = mapped(torch.zeros_like, weights) if rest is None else rest
    out, losses, start = [], [], (weights, momentum)
    factors: list[Tensor] = []
    lost = None if max_grad_norm is None else k.new_zeros(k.shape[:-2], dtype=torch.int64)
    for t in range(k.shape[-2]):
        if t % chunk == 0:
            if resets is not None:
                weights, momentum = reset_where(resets[..., t // chunk], first, (weights, momentum))
            start, factors = (weights, momentum), []
        row = slice(t, t + 1)
        if read == "before":
            out.append(memory_read(q[..., row, :], weights, **form))
        own = None if written is None else written[..., row]
        token = k[..., row, :], v[..., row, :]
        if max_grad_norm is None:
            rows, factor = rows_of(*token, None, start[0], FACTOR, **form), None
        else:
            rows, factor = clipped_rows(
                *token, own, start[0], activation, residual_norm, max_grad_norm
            )
            factors.append(factor)
        losses.append(losses_of(rows, own, factor))
        new_momentum = mapped(
            lambda s, g, t=t: over(eta[..., t], s) * s - over(theta[..., t], g) * g,
            momentum,
            gradients_of(rows, weights),
        )
        new_weights = mapped(
            lambda w, r, s, t=t: over(1.0 - alpha[..., t], w) * w + over(alpha[..., t], w) * r + s,
            *(weights, zero, new_momentum),
        )
        if written is not None:
            new_momentum, new_weights = (
                mapped(lambda x, y, t=t: torch.where(over(written[..., t], x), x, y), new, old)
                for new, old in ((new_momentum, momentum), (new_weights, weights))
            )
        weights, momentum = new_weights, new_momentum
        if read == "after":
            out.append(memory_read(q[..., row, :], weights, **form))
        if lost is not None and t + 1 in (t // chunk * chunk + chunk, k.shape[-2]):
            taken = are_finite(weights, momentum)
            part = None if written is None else written[..., t + 1 - len(factors) : t + 1]
            lost = lost + lost_tokens(torch.cat(factors, -1), taken.unsqueeze(-1), part)
            weights, momentum = (
                kept_where(taken, *pair) for pair in zip((weights, momentum), start, strict=True)
            )
    loss = torch.cat(losses, -1) if losses else k[..., 0]
    return torch.cat(out, -2) if out else q, weights, momentum, lost, loss


def reset_where(
    resets: Tensor, first: tuple[Weights, Weights], last: tuple[Weights, Weights]
) -> tuple[Weights, Weights]:
    """Weights and momentum, ``first`` where ``resets [*lead]`` is True, ``last`` elsewhere."""
    weights, momentum = (kept_where(resets, *pair) for pair in zip(first, last, strict=True))
    return weights, momentum


class Decays(NamedTuple):
    """The factors that the gates of a chunk of C tokens give to the weights W and the momentum S
    with which the chunk began, and to the gradient G_j of every token j:

        W_t = keep_t W + (1 - keep_t) rest + carry_t S - sum_{j <= t} gamma_tj G_j
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
    rest: Weights | None = None,
    *,
    chunk: int = 64,
    activation: str = "silu",
    read: str = "after",
    residual_norm: bool = False,
    max_grad_norm: float | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Weights, Weights, Tensor | None, Tensor]:
    """The same by matrix products, one chunk after the other: every G_j is an outer product, so no
    token needs weights of its own.
    """
    tensors = q, k, v, weights, momentum, (alpha, eta, theta), written, rest, resets
    options = chunk, activation, read, residual_norm, max_grad_norm
    y, states, loss, factors, taken = chunk_by_chunk(*tensors, *options)
    if max_grad_norm is None:
        return y, *states[-1], None, loss
    lost = lost_tokens(factors, of_tokens(taken, chunk, factors), written)
    return y, *states[-1], lost, loss


@torch.no_grad()
def losses_of(rows: Rows, written: Tensor | None, factors: Tensor | None) -> Tensor:
    """The inner loss of every row, ``[.., N]``; 0 of those that write nothing."""
    loss = rows.residual.square().sum(-1)
    for each in (written, None if factors is None else factors != 0.0):
        loss = loss if each is None else torch.where(each, loss, 0.0)
    return loss


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
    rest: Weights | None,
    resets: Tensor | None,
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    max_grad_norm: float | None,
) -> tuple[Tensor, list[tuple[Weights, Weights]], Tensor, Tensor, Tensor]:
    """y, weights and momentum at the start of every chunk and after the last, and the inner loss of
    the tokens ``[*lead, T]``. With ``max_grad_norm`` the factors of the tokens' gradients
    ``[*lead, T]``, and which chunks were taken ``[*lead, chunks]``; nothing without.
    """
    lead = q.shape[:-2]
    # One batch of matrices, laid out for the products: each of them would copy it.
    q, k, v = (x.reshape(math.prod(lead), *x.shape[-2:]) for x in (q, k, v))
    weights, momentum = (
        mapped(lambda x: x.reshape(len(q), *x.shape[len(lead) :]), half)
        for half in (weights, momentum)
    )
    if rest is not None:
        rest = mapped(lambda x: x.expand(*lead, *x.shape[1:]).reshape(len(q), *x.shape[1:]), rest)
    numbers = [*gates] if written is None else [*gates, written]
    numbers = [x.reshape(q.shape[:2]) for x in numbers]
    if written is not None:
        k, v = (torch.where(numbers[-1].unsqueeze(-1), x, 0.0) for x in (k, v))
    first = weights, momentum
    starting = None if resets is None else resets.reshape(len(q), resets.shape[-1])
    out, states = [q[:, :0]], [first]
    losses = [q[:, :0, 0]]
    factors, taken = [q[:, :0, 0]], [q[:, :0, 0].bool()]
    # Tensors without tokens would split into one part.
    parts = [x.split(chunk, 1) for x in (q, k, v, *numbers)] if q.shape[1] else []
    for index, part in enumerate(zip(*parts, strict=True)):
        if starting is not None:
            weights, momentum = reset_where(starting[:, index], first, (weights, momentum))
            states[-1] = weights, momentum
        q_part, k_part, v_part = part[:3]
        if max_grad_norm is None:
            decays = decays_of(*part[3:])
            rows = rows_of(k_part, v_part, None, weights, FACTOR, activation, residual_norm)
            losses.append(losses_of(rows, part[6] if len(part) > 6 else None, None))
            memory = weights, momentum, rest
            form = activation, read, residual_norm
            out.append(reads_of(q_part, rows, *memory, decays, *form))
            weights, momentum = chunk_end(rows, *memory, decays)
        else:
            options = activation, read, residual_norm, max_grad_norm
            y, weights, momentum, *found = guarded_chunk(*part, weights, momentum, rest, *options)
            out.append(y)
            for parts_of, one in zip((losses, factors, taken), found, strict=True):
                parts_of.append(one)
        states.append((weights, momentum))

    def unflat(x: Tensor) -> Tensor:
        return x.reshape(*lead, *x.shape[1:])

    return (
        unflat(torch.cat(out, 1)),
        [(mapped(unflat, weights), mapped(unflat, momentum)) for weights, momentum in states],
        unflat(torch.cat(losses, 1)),
        unflat(torch.cat(factors, 1)),
        unflat(torch.cat(taken, 1)),
    )


def reads_of(
    q: Tensor,
    rows: Rows,
    weights: Weights,
    momentum: Weights,
    rest: Weights | None,
    decays: Decays,
    activation: str,
    read: str,
    residual_norm: bool,
) -> Tensor:
    """What the queries of one chunk read.

    Layer l of the memory that token t reads, with its inputs x_t and x_j of query t and key j:

        keep_t (w_l x_t + b_l) + carry_t (s_l x_t + c_l) - sum_j gamma_tj (x_t x_j + 1) p_j

    and (1 - keep_t) times rest's layer of x_t.
    """
    seen, keep, carry = -decays.gamma, decays.keep, decays.carry
    if read == "before":
        # Every query reads what the token before it has left.
        seen = F.pad(seen, (0, 0, 1, 0))[..., :-1, :]
        keep, carry = F.pad(keep, (1, 0), value=1.0)[..., :-1], F.pad(carry, (1, 0))[..., :-1]
    x = q
    layers = zip(layers_of(weights), layers_of(momentum), rows.inputs, rows.by_z, strict=True)
    resting = [] if rest is None else list(layers_of(rest))
    for layer, (old, moving, keys, p) in enumerate(layers):
        if layer:
            x = ACTIVATIONS[activation](x)
        kept = keep.unsqueeze(-1) * linear(x, *old)
        if resting:
            kept = torch.addcmul(kept, 1.0 - keep.unsqueeze(-1), linear(x, *resting[layer]))
        carried = torch.addcmul(kept, carry.unsqueeze(-1), linear(x, *moving))
        # seen * (x keys^T + 1)
        x = torch.baddbmm(carried, torch.addcmul(seen, seen, x @ keys.mT), p)
    return q + normalised(x)[0] if residual_norm else x


def chunk_end(
    rows: Rows, weights: Weights, momentum: Weights, rest: Weights | None, decays: Decays
) -> tuple[Weights, Weights]:
    """Weights and momentum after the chunk's last token."""
    keep, carry, decay = decays.keep[..., -1], decays.carry[..., -1], decays.decay[..., -1]
    kept = mapped(lambda w: over(keep, w) * w, weights)
    if rest is not None:
        kept = mapped(lambda w, r: torch.addcmul(w, over(1.0 - keep, r), r), kept, rest)
    return (
        mapped(
            lambda w, s, g: torch.addcmul(w, over(carry, s), s) - g,
            kept,
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
) -> tuple[Tensor, Weights, Weights, Tensor, Tensor, Tensor]:
    """One chunk with a clip. Where the memory is not finite after it, it stays as it was, as if no
    token were written, and no gradient passes through the chunk's reads, which are of what its
    tokens wrote.

    Args:
        arguments: q, k, v, the gates, and which tokens are written where some are not; weights,
            momentum and rest; activation, read, residual_norm and the largest norm.

    Returns:
        (y, weights and momentum after the chunk, the inner loss of its tokens and the factors of
        their gradients ``[N, C]``, whether it was taken ``[N, 1]``).
    """
    q, k, v, *numbers, weights, momentum, rest, activation, read, residual_norm, limit = arguments
    alpha, eta, theta = numbers[:3]
    written = numbers[3] if len(numbers) > 3 else torch.ones_like(k[..., 0], dtype=torch.bool)

    def chunk(written: Tensor) -> tuple[Tensor, Weights, Weights, Tensor, Tensor]:
        decays = decays_of(alpha, eta, theta, written)
        own_k, own_v = (torch.where(written.unsqueeze(-1), x, 0.0) for x in (k, v))
        options = activation, residual_norm, limit
        rows, factors = clipped_rows(own_k, own_v, written, weights, *options)
        memory = weights, momentum, rest
        y = reads_of(q, rows, *memory, decays, activation, read, residual_norm)
        loss = losses_of(rows, written, factors)
        return y, *chunk_end(rows, *memory, decays), loss, factors

    with torch.no_grad():
        y, *ends, loss, factors = chunk(written)
        taken = are_finite(*ends)
    # Again, with nothing that is not finite among the numbers that autograd multiplies by zeros.
    seen, *ends, _, _ = chunk(written & taken.unsqueeze(-1))
    weights, momentum = (
        kept_where(taken, *pair) for pair in zip(ends, (weights, momentum), strict=True)
    )
    return (
        torch.where(over(taken, y), seen, y),
        weights,
        momentum,
        loss,
        factors,
        taken.unsqueeze(-1),
    )
