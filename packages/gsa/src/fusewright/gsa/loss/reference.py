"""The indexer's loss in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

Computed in fp32 (in fp64 for fp64 inputs). All scores of a call are in memory at once.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.precision import wide
from ..indexer.reference import gated_indexer, keys_seen
from ..sparse.reference import of_each_head, times_selected

Tensor = torch.Tensor


def indexer_kl_loss(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    bias: Tensor,
    temperature: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None = None,
    count: Tensor | None = None,
    ranges: Tensor | None = None,
    index_scale: float = 1.0,
    scale: float = 1.0,
    causal: bool = True,
    q_offset: int = 0,
    form: str = "gated",
) -> Tensor:
    """mean_t KL(p_t || softmax(temperature I_t)), p_t the mean of the heads' probabilities; see the
    public function.
    """
    seen = keys_seen(q, k, causal, q_offset, ranges)
    times = times_counted(q, k, indices, count, seen)
    # A constant: the attention does not learn from the loss.
    p = attention_target(q, k, lse, times, scale).to(wide(q_index).dtype).detach()
    scores = gated_indexer(q_index, k_index, w, bias, ranges, index_scale, causal, q_offset, form)
    log_softmax = log_probabilities(scores, temperature, times)
    log_p = torch.where(p > 0, p, 1.0).log()
    rows: int | Tensor = max(q.shape[0] * q.shape[1], 1)
    if ranges is not None:
        rows = seen.any(-1).sum().clamp(min=1)
    return (p * (log_p - log_softmax)).sum() / rows


def indexer_kl_loss_with_slopes(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """:func:`indexer_kl_loss` and its gradients for q_index, k_index, w, bias and temperature, in
    fp32.
    """

    def forward(*learning: Any) -> Tensor:
        return indexer_kl_loss(*learning, *arguments[5:], **options)

    learning = (x.to(wide(arguments[0]).dtype) for x in arguments[:5])
    loss, pullback = torch.func.vjp(forward, *learning)[:2]
    return loss, *(slope.contiguous() for slope in pullback(torch.ones_like(loss)))


def times_counted(
    q: Tensor,
    k: Tensor,
    indices: Tensor | None,
    count: Tensor | None,
    seen: Tensor,
) -> Tensor:
    """How often the loss of each row counts each key, [B, T, Tkv]: those it has ``seen`` once, or
    of them those it has selected as often as it names them.
    """
    if indices is None:
        return seen.expand(q.shape[0], -1, -1).int()
    return torch.where(seen, times_selected(indices, count, k.shape[1]), 0)


def attention_target(q: Tensor, k: Tensor, lse: Tensor, times: Tensor, scale: float) -> Tensor:
    """The heads' probabilities, their sum over the counted keys made 1, [B, T, Tkv]."""
    scores = torch.einsum("bthd,bshd->bhts", wide(q), of_each_head(wide(k), q)) * scale
    lse = wide(lse).unsqueeze(-1)
    counted = (times > 0).unsqueeze(1) & (lse > float("-inf"))
    total = torch.where(counted, torch.where(counted, scores - lse, 0.0).exp(), 0.0).sum(1)
    total = total * times
    mass = total.sum(-1, keepdim=True)
    return total / torch.where(mass > 0, mass, 1.0)


def log_probabilities(scores: Tensor, temperature: Tensor, times: Tensor) -> Tensor:
    """log softmax(temperature I) over the counted keys, zero elsewhere."""
    counts = times > 0
    x = torch.where(counts, scores, 0.0) * wide(temperature)
    x = x + torch.where(counts, times, 1).to(x.dtype).log()
    some = counts.any(-1, keepdim=True)
    x = torch.where(counts | ~some, x, float("-inf")).log_softmax(-1)
    return torch.where(counts, x, 0.0)
