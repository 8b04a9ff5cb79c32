"""The scans as their ops see them, in plain torch: what a CPU runs. q, k, v are [B, T, heads, D],
gates and ``written`` [B, T, heads], weights and momentum of a state packed in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.precision import wide
from ..common.deep_weights import pack_deep, unpack_deep
from ..common.weights import MemoryWeights, Weights, packed_copy, unpack_weights, views
from .reference import chunk_by_chunk

Tensor = torch.Tensor


def packed_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    rest: Tensor | None,
    resets: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan as its op sees it: q, k, v [B, T, heads, D], gates and ``written`` [B, T, heads],
    weights and momentum packed [B, heads, 2, SIZE], ``rest`` packed [heads, 1, SIZE], ``resets``
    [B, chunks].

    Returns:
        (y, the packed state after the last token, the states with which the chunks began
        [chunks, B, heads, 2, SIZE], none of them without ``starts``, the inner loss of the tokens
        [B, T, heads]).
    """
    operands = q, k, v, state, alpha, eta, theta, written, rest, resets
    options = hidden, chunk, activation, read, residual_norm
    return packed_chunks(*operands, *options, None, starts)[:4]


def packed_clipped_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    rest: Tensor | None,
    resets: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    max_grad_norm: float,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with a clip.

    Returns:
        (y, the packed state after the last token, the states with which the chunks began, the
        inner loss of the tokens and the factors of their gradients [B, T, heads], which chunks
        were taken [B, chunks, heads]).
    """
    operands = q, k, v, state, alpha, eta, theta, written, rest, resets
    options = hidden, chunk, activation, read, residual_norm
    return packed_chunks(*operands, *options, max_grad_norm, starts)


def packed_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    rest: Tensor | None,
    resets: Tensor | None,
    hidden: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of a memory of two layers; as :func:`unpacked_chunks` otherwise."""
    weights, momentum = views(state, hidden, q.shape[-1])
    resting = None if rest is None else unpack_weights(rest, hidden, q.shape[-1])
    halves = weights, momentum, resting
    masks = written, resets
    return unpacked_chunks(q, k, v, halves, (alpha, eta, theta), masks, packed, *options)


def of_heads(resets: Tensor | None, q: Tensor) -> Tensor | None:
    """``resets [B, chunks]`` for every head of q ``[B, heads, T, D]``."""
    return None if resets is None else resets.unsqueeze(1).expand(-1, q.shape[1], -1)


def packed(weights: Weights, momentum: Weights) -> Tensor:
    """``[*lead, 2, SIZE]``, a copy."""
    return packed_copy(MemoryWeights(*weights), MemoryWeights(*momentum))


def packed_deep_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    written: Tensor | None,
    rest: Tensor | None,
    resets: Tensor | None,
    layers: int,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`packed_scan` of a memory of three layers or more, packed as in
    ``common.deep_weights``.
    """
    sizes = layers, hidden, q.shape[-1]
    weights, momentum = unpack_deep(state, *sizes)
    halves = weights, momentum, None if rest is None else unpack_deep(rest, *sizes)[0]
    gates, options = (alpha, eta, theta), (chunk, activation, read, residual_norm, None, starts)
    masks = written, resets
    return unpacked_chunks(q, k, v, halves, gates, masks, pack_deep, *options)[:4]


def unpacked_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    halves: tuple[Weights, Weights, Weights | None],
    gates: tuple[Tensor, ...],
    masks: tuple[Tensor | None, Tensor | None],
    pack: Callable[[Weights, Weights], Tensor],
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    max_grad_norm: float | None,
    starts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scan with a clip, or without one, of weights, momentum and rest; ``pack`` makes states of
    the first two. ``masks`` are which tokens are written and which chunks are reset.
    """
    dtype = q.dtype
    q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
    written, resets = masks
    mask = None if written is None else written.mT
    weights, momentum, rest = halves
    tensors = q, k, v, weights, momentum, [gate.mT for gate in gates], mask, rest
    options = chunk, activation, read, residual_norm, max_grad_norm
    found = chunk_by_chunk(*tensors, of_heads(resets, q), *options)
    y, states, loss, factors, taken = found
    *begins, end = [pack(*each) for each in (states if starts else states[-1:])]
    began = torch.stack(begins) if begins else end.new_empty(0, *end.shape)
    y = y.transpose(1, 2).to(dtype).contiguous()
    loss, factors, taken = (x.mT.detach().contiguous() for x in (loss, factors, taken))
    return y, end, began, loss, factors, taken


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
    rest: Tensor | None,
    resets: Tensor | None,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    max_grad_norm: float | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta, rest), chunk by chunk from the last one,
    each recomputed from the state with which it began; that of ``rest`` has no number without it.
    """
    operands = q, k, v, state, alpha, eta, theta, written, rest, resets
    options = hidden, chunk, activation, read, residual_norm, max_grad_norm
    return pulled_back(packed_chunks, dy, dend, operands, options, chunk)


def packed_deep_backward(dy: Tensor, dend: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The same of a memory of three layers or more."""
    operands, options = arguments[:10], arguments[10:]
    return pulled_back(packed_deep_scan, dy, dend, operands, options, options[2])


def pulled_back(
    scan: Callable[..., tuple[Tensor, ...]],
    dy: Tensor,
    dend: Tensor,
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    chunk: int,
) -> tuple[Tensor, ...]:
    """The gradients of the operands, but of ``written``, of a packed scan: ``scan(*operands,
    *options, starts)`` is y, the last state and, with ``starts``, those with which the chunks
    began.
    """
    q, k, v, state, alpha, eta, theta, written, rest, resets = operands
    states = scan(*operands, *options, True)[2]
    drest = state.new_zeros(0) if rest is None else torch.zeros_like(rest)
    dfirst = torch.zeros_like(state)
    rows: list[tuple[Tensor, ...]] = []
    for index in reversed(range(len(states))):
        part = slice(index * chunk, (index + 1) * chunk)
        mask = None if written is None else written[:, part]

        def step(q, k, v, state, alpha, eta, theta, *resting, mask=mask):
            tensors = q, k, v, state, alpha, eta, theta, mask, *(resting or (None,)), None
            return scan(*tensors, *options, False)[:2]

        pullback = torch.func.vjp(
            step,
            *(wide(x[:, part]) for x in (q, k, v)),
            states[index],
            *(x[:, part] for x in (alpha, eta, theta)),
            *(() if rest is None else (rest,)),
        )[1]
        dq, dk, dv, dend, dalpha, deta, dtheta, *more = pullback((wide(dy[:, part]), dend))
        rows.append((dq, dk, dv, dalpha, deta, dtheta))
        drest = drest + more[0] if more else drest
        if resets is not None:
            # To the state of the row, and not to what the chunk before leaves.
            reset = resets[:, index].view(-1, 1, 1, 1)
            dfirst = dfirst + torch.where(reset, dend, 0.0)
            dend = torch.where(reset, 0.0, dend)
    if not rows:
        return (
            *(torch.zeros_like(x) for x in (q, k, v)),
            dend.clone(),
            *map(torch.zeros_like, (alpha, eta, theta)),
            drest,
        )
    dq, dk, dv, *dgates = (torch.cat(parts[::-1], 1) for parts in zip(*rows, strict=True))
    return *(x.to(q.dtype) for x in (dq, dk, dv)), dend + dfirst, *dgates, drest
