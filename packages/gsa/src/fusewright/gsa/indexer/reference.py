"""The indexer's scores in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

Computed in fp32 (in fp64 for fp64 inputs), and returned so. All scores of a call are in memory at
once.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.precision import wide

Tensor = torch.Tensor


def gated_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    ranges: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = True,
    q_offset: int = 0,
    form: str = "gated",
) -> Tensor:
    """I_ts = sum_h sigmoid(w_th) sigmoid(scale q_th . k_s + b_h), or, with the form "relu",
    sum_h w_th relu(scale q_th . k_s + b_h); see the public function.
    """
    products = torch.einsum("bthd,bsd->bths", wide(q), wide(k))
    z = scale * products + bias.to(products.dtype)[:, None]
    gate, y = w.to(z.dtype), z.relu()
    if form == "gated":
        gate, y = gate.sigmoid(), z.sigmoid()
    scores = (gate.unsqueeze(-1) * y).sum(2)
    return torch.where(keys_seen(q, k, causal, q_offset, ranges), scores, float("-inf"))


def gated_indexer_backward(dscores: Tensor, *operands: Any, **options: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dw, dbias) from the gradient of the scores."""

    def forward(*learning: Any) -> Tensor:
        return gated_indexer(*learning, *operands[4:], **options)

    grads = torch.func.vjp(forward, *operands[:4])[1](dscores)
    return tuple(grad.contiguous() for grad in grads)


def keys_seen(
    q: Tensor, k: Tensor, causal: bool, q_offset: int, ranges: Tensor | None = None
) -> Tensor:
    """Which keys the rows of q see, [Tq, Tkv], or [B, Tq, Tkv] of those in the ``ranges``: with
    ``causal`` those at their position and before it; the first row stands at ``q_offset``.
    """
    position = torch.arange(q.shape[1], device=q.device).unsqueeze(-1) + q_offset
    key = torch.arange(k.shape[1], device=q.device)
    seen = (key <= position) if causal else (key >= 0).expand(q.shape[1], -1)
    if ranges is None:
        return seen
    first, last = ranges.unsqueeze(-2).unbind(-1)
    return seen & (key >= first) & (key < last)
