"""The inputs of the memory in plain torch, from the joint projection and the logits, and the tokens
that are left out: the specification, the yardstick of the tests and the CPU implementation.

Everything is computed in fp32 (in fp64 for fp64 inputs); queries, keys and values are rounded once,
to the projection's dtype. Gradients are autograd's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .._core.precision import wide
from .._core.registration import second_order

Tensor = torch.Tensor

# Added to the square of a key's norm, or to its mean square: a key of zeros stays one.
NORM_EPS = 1e-6


def memory_input(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor,
    present: Tensor | None,
    heads: int,
    key_norm: str | None,
    largest: float,
    theta: float | None,
) -> tuple[Tensor, ...]:
    """``(q, k, v, alpha, eta, theta, written, history of the next call)``."""
    seen = torch.cat((wide(history), wide(joint)), 1)
    # [B, T, 3, heads, D]
    rows = F.silu(convolved(seen, taps)).unflatten(-1, (3, heads, -1))
    q, k = (normalised(x, key_norm).to(joint.dtype) for x in rows[:, :, :2].unbind(2))
    v = rows[:, :, 2].to(joint.dtype)
    gates = gates_of(logits, heads, largest, theta)
    written = finite_rows(torch.stack((k, v)).detach()).all(0)
    written = written & torch.stack(gates).detach().isfinite().all(0)
    if present is not None:
        written = written & present.unsqueeze(-1)
    contiguous = (x.contiguous() for x in (q, k, v, *gates))
    return *contiguous, written, last_rows(seen, history)


def memory_queries(
    joint: Tensor, history: Tensor, taps: Tensor | None, heads: int, key_norm: str | None
) -> tuple[Tensor, Tensor]:
    """``(q, history of the next call)`` of a projection of queries alone."""
    seen = torch.cat((wide(history), wide(joint)), 1)
    rows = F.silu(convolved(seen, taps)).unflatten(-1, (heads, -1))
    return normalised(rows, key_norm).to(joint.dtype).contiguous(), last_rows(seen, history)


def memory_input_backward(
    joint: Tensor,
    history: Tensor,
    taps: Tensor | None,
    logits: Tensor | None,
    *grads_and_options: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of (joint, history, taps, logits).

    Args:
        joint, history, taps, logits: as in :func:`memory_input`; without logits, as in
            :func:`memory_queries`.
        grads_and_options: the gradients of q, k, v, alpha, eta, theta and the next history, None
            for an output that is not used; then heads, key_norm, largest and theta.
    """
    *grads, heads, key_norm, largest, theta = grads_and_options
    given = [grads[0], grads[6]] if logits is None else grads

    def used_outputs(joint, history, taps, logits):
        if logits is None:
            outputs = [*memory_queries(joint, history, taps, heads, key_norm)]
        else:
            options = None, heads, key_norm, largest, theta
            *outputs, _, last = memory_input(joint, history, taps, logits, *options)
            outputs.append(last)
        return tuple(y for y, g in zip(outputs, given, strict=True) if g is not None)

    used = [g for g in given if g is not None]
    gradients = second_order(used_outputs, (joint, history, taps, logits), used)
    if grads[3] is None:
        # Gates that are not used have none.
        gradients[3] = None
    return tuple(g if g is None else g.contiguous() for g in gradients)


def convolved(seen: Tensor, taps: Tensor | None) -> Tensor:
    """The causal depthwise convolution of ``seen [B, reach + T, channels]``, which begins with the
    rows before the first token, with ``taps [channels, reach + 1]``.
    """
    if taps is None:
        return seen
    taps = wide(taps).to(seen.dtype)
    length = seen.shape[1] - taps.shape[1] + 1
    if seen.is_cpu and length:
        # The fastest of torch's convolutions there. A GPU's may sum gradients in any order.
        return F.conv2d(seen.mT.unsqueeze(2), taps[:, None, None], groups=len(taps)).squeeze(2).mT
    out = seen[:, :length] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        out = torch.addcmul(out, seen[:, tap : tap + length], taps[:, tap])
    return out


def normalised(x: Tensor, key_norm: str | None) -> Tensor:
    """Every head's vector divided by its norm ("l2") or its root mean square ("rms")."""
    if key_norm is None:
        return x
    squares = x.square()
    size = squares.sum(-1, True) if key_norm == "l2" else squares.mean(-1, True)
    return x * torch.rsqrt(size + NORM_EPS)


def gates_of(
    logits: Tensor, heads: int, largest: float, theta: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, eta and theta ``[B, T, heads]`` of ``logits [B, T, 3 * heads]``:

        alpha, eta, rate = sigmoid(logits)
        theta = largest (1 - eta) rate

    or of two thirds of them, theta being a constant.
    """
    gates = torch.sigmoid(wide(logits)).unflatten(-1, (-1, heads))
    if theta is None:
        alpha, eta, rate = gates.unbind(-2)
        return alpha, eta, largest * (1.0 - eta) * rate
    alpha, eta = gates.unbind(-2)
    return alpha, eta, torch.full_like(alpha, theta)


def last_rows(seen: Tensor, history: Tensor) -> Tensor:
    """As many rows as the history has, in its dtype; a copy, since a view would keep the tensors of
    the whole call alive.
    """
    return seen[:, seen.shape[1] - history.shape[1] :].to(history.dtype, copy=True).contiguous()


def finite_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x ``[B, T, dim]`` with zeros for tokens that are masked or not finite, and ``[B, T]`` which
    are neither.
    """
    present = finite_rows(x.detach())
    if mask is not None:
        present = present & mask
    return kept_tokens(x, present.unsqueeze(-1), None, 0.0), present


def gated_tokens(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`finite_tokens`, and the gates' logits ``[B, T, n]`` of the first of them, ``weight
    [n, dim]`` and ``bias [n]``.
    """
    y, present = finite_tokens(x, mask)
    rows = wide(y)
    return y, present, F.linear(rows, weight.to(rows.dtype), bias.to(rows.dtype))


def gated_tokens_backward(
    y: Tensor, present: Tensor, weight: Tensor, dy: Tensor | None, dlogits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias)."""
    dx = dlogits @ weight.to(dlogits.dtype)
    if dy is not None:
        dx = dx + dy
    dx = torch.where(present.unsqueeze(-1), dx, 0.0).to(y.dtype)
    slopes = dlogits.flatten(0, 1)
    dweight = slopes.mT @ y.flatten(0, 1).to(slopes.dtype)
    return dx, dweight.to(weight.dtype), slopes.sum(0).to(weight.dtype)


def counted_tokens(
    written: Tensor,
    skipped: Tensor,
    position: Tensor,
    mask: Tensor | None,
    lost: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens not written now, in all, tokens since the row's start)``: ``[B, heads]``, ``[B,
    heads]`` and ``[B]``.

    Args:
        written: ``[B, T, heads]``, of a call.
        skipped, position: the counters before it.
        mask: ``[B, T]``, which tokens should have been written, or None for all.
        lost: ``[B, heads]``, tokens of steps that were skipped, or None.
    """
    tokens = written.shape[1] if mask is None else mask.sum(1, keepdim=True)
    now = tokens - written.sum(1)
    if lost is not None:
        now = now + lost
    return now, skipped + now, position + written.shape[1]


def kept_tokens(x: Tensor, kept: Tensor, mask: Tensor | None, other: float) -> Tensor:
    """x ``[B, T, dim]`` where all of ``kept [B, T, n]`` is True, ``other`` elsewhere; zeros where
    ``mask [B, T]`` is False.
    """
    y = torch.where(kept.all(-1, True), x, other)
    return y if mask is None else torch.where(mask.unsqueeze(-1), y, 0.0)


def finite_rows(x: Tensor) -> Tensor:
    """Whether the last axis is finite, and its sum too: one pass, where torch.isfinite takes
    several.
    """
    return x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()
