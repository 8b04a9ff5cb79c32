"""The scan of a memory of three layers or more as its op sees it, in plain torch: what a CPU runs.
Weights and momentum are packed as in ``common.deep_weights``.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.precision import wide
from ..common.deep_weights import pack_deep, unpack_deep
from .reference import chunk_by_chunk, pulled_back

Tensor = torch.Tensor


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
    layers: int,
    hidden: int,
    chunk: int,
    activation: str,
    read: str,
    residual_norm: bool,
    starts: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan as its op sees it: q, k, v [B, T, heads, D], gates and ``written`` [B, T, heads],
    weights and momentum packed [B, heads, 2, SIZE], ``rest`` packed [heads, 1, SIZE].

    Returns:
        (y, the packed state after the last token, the states with which the chunks began
        [chunks, B, heads, 2, SIZE], none of them without ``starts``, the inner loss of the tokens
        [B, T, heads]).
    """
    dtype, sizes = q.dtype, (layers, hidden, q.shape[-1])
    q, k, v = (wide(x).transpose(1, 2) for x in (q, k, v))
    weights, momentum = unpack_deep(state, *sizes)
    gates = [gate.mT for gate in (alpha, eta, theta)]
    mask = None if written is None else written.mT
    resting = None if rest is None else unpack_deep(rest, *sizes)[0]
    tensors = q, k, v, weights, momentum, gates, mask, resting
    options = chunk, activation, read, residual_norm, None
    y, states, loss, _, _ = chunk_by_chunk(*tensors, *options)
    *begins, end = [pack_deep(*halves) for halves in (states if starts else states[-1:])]
    began = torch.stack(begins) if begins else state.new_empty(0, *state.shape)
    y = y.transpose(1, 2).to(dtype).contiguous()
    return y, end, began, loss.mT.detach().contiguous()


def packed_deep_backward(dy: Tensor, dend: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of (q, k, v, state, alpha, eta, theta, rest), the last one empty where there is no
    rest; chunk by chunk from the last one, each recomputed from the state with which it began.
    """
    operands, options = arguments[:9], arguments[9:]
    return pulled_back(packed_deep_scan, dy, dend, operands, options, options[2])
