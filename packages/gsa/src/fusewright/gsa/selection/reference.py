"""The selection by the indexer's scores in plain torch: the specification, the yardstick of the
tests and the CPU implementation. All scores of a call are in memory at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..indexer.reference import gated_indexer, keys_seen

Tensor = torch.Tensor


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    ranges: Tensor | None,
    variance_ema: Tensor | None,
    scale: float,
    law: str,
    k_base: int,
    k_min: int,
    k_max: int,
    sinks: int = 0,
    window: int = 0,
    causal: bool = True,
    q_offset: int = 0,
    form: str = "gated",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(indices, count, variance, entropy) of the keys that each row selects; see the public
    function. entropy is that of the scores' softmax over log(n + 1).
    """
    scores = gated_indexer(q, k, w, bias, ranges, scale, causal, q_offset, form)
    seen = keys_seen(q, k, causal, q_offset, ranges)
    counts = dict(k_base=k_base, k_min=k_min, k_max=k_max, sinks=sinks, window=window)
    return select(scores, seen, variance_ema, law=law, **counts)


def select(
    scores: Tensor,
    seen: Tensor,
    variance_ema: Tensor | None = None,
    *,
    law: str,
    k_base: int,
    k_min: int,
    k_max: int,
    sinks: int = 0,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The selection from scores [B, Tq, Tkv], of which each row may take those it has seen."""
    scores = scores.nan_to_num(nan=0.0)
    variance, entropy = score_statistics(scores, seen)
    factor = law_factor(law, variance, entropy, variance_ema)
    count = (k_base * factor).floor().clamp(k_min, k_max).to(torch.int64)
    count = torch.minimum(count, seen.sum(-1))
    indices = greatest(scores, seen, count, k_max, sinks, window)
    return indices, count.to(torch.int32), variance, entropy


def greatest(
    scores: Tensor, seen: Tensor, count: Tensor, k_max: int, sinks: int, window: int
) -> Tensor:
    """The ``count`` first keys of each row by descending score, then by ascending index, in k_max
    slots; before all its first ``sinks`` and its last ``window``.
    """
    keys = scores.shape[-1]
    number = seen.cumsum(-1)
    always = (number <= sinks) | (number > number[..., -1:] - window)
    # Two sorts: no score, not even an infinite one, stands for what is always or never selected.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    level = (seen.to(torch.uint8) + (seen & always)).expand_as(order).gather(-1, order)
    order = order.gather(-1, level.sort(dim=-1, descending=True, stable=True).indices)
    slot = torch.arange(k_max, device=scores.device)
    order = F.pad(order, (0, max(k_max - keys, 0)))[..., :k_max]
    # Slots that are not valid go last.
    chosen = torch.where(slot < count.unsqueeze(-1), order, keys).sort(-1).values
    return torch.where(chosen < keys, chosen, -1).to(torch.int32)


def score_statistics(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The population variance of the scores that each row sees, and the entropy of their softmax
    over log(n + 1); 0 for a row that sees none.
    """
    visible = seen.sum(-1).clamp(min=1).to(scores.dtype)
    valid = torch.where(seen, scores, 0.0)
    mean = valid.sum(-1) / visible
    deviation = torch.where(seen, valid - mean.unsqueeze(-1), 0.0)
    variance = deviation.square().sum(-1) / visible
    highest = torch.where(seen, deviation, float("-inf"))
    # Without any key there would be no maximum.
    highest = F.pad(highest, (0, 1), value=float("-inf")).amax(-1, keepdim=True)
    log_weight = torch.where(seen, deviation - highest, 0.0)
    weight = torch.where(seen, log_weight.exp(), 0.0)
    total = weight.sum(-1)
    entropy = total.log() - (weight * log_weight).sum(-1) / total
    return variance, torch.where(seen.any(-1), entropy / (visible + 1.0).log(), 0.0)


def law_factor(law: str, variance: Tensor, entropy: Tensor, variance_ema: Tensor | None) -> Tensor:
    """The factor of k_base; without an average to compare with, every row is typical."""
    if law == "fixed":
        return torch.ones_like(variance)
    if law == "entropy":
        return 0.5 + entropy
    ratio = torch.ones_like(variance)
    if variance_ema is not None:
        known = variance_ema > 0.0
        ratio = torch.where(known, variance / variance_ema.clamp(min=1e-6), 1.0)
    return ratio if law == "proportional" else 0.5 + 1.0 / (1.0 + ratio)
