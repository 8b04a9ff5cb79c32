"""Every op in plain torch: the specification, the yardstick of the tests and what a CPU runs.

Computed in fp32 (in fp64 for fp64 inputs). Scores of the indexer are returned so; everything else
is rounded once, to the inputs' dtype. All scores of a call are held at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def gated_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    *,
    scale: float,
    causal: bool = True,
    q_offset: int = 0,
) -> Tensor:
    """I_ts = sum_h sigmoid(w_th) sigmoid(scale q_th . k_s + b_h); see the public function."""
    gate, activation = gates(q, k, w, bias, scale)
    scores = (gate.unsqueeze(-1) * activation).sum(2)
    return torch.where(keys_seen(q, k, causal, q_offset), scores, float("-inf"))


def gated_indexer_backward(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    *,
    scale: float,
    causal: bool = True,
    q_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dw, dbias) from the gradient of the scores."""
    gate, activation = gates(q, k, w, bias, scale)
    seen = keys_seen(q, k, causal, q_offset)
    # Keys that a row does not see give it nothing and get nothing, not even a NaN.
    g = torch.where(seen, dscores.to(gate.dtype), 0.0).unsqueeze(2)
    dgate = torch.where(seen.unsqueeze(1), g * activation, 0.0).sum(-1)
    dz = g * gate.unsqueeze(-1) * activation * (1.0 - activation)
    dz = torch.where(seen.unsqueeze(1), dz, 0.0)
    dq = scale * torch.einsum("bths,bsd->bthd", dz, wide(k))
    dk = scale * torch.einsum("bths,bthd->bsd", dz, wide(q))
    dw = dgate * gate * (1.0 - gate)
    dbias = dz.sum((0, 1, 3))
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype), dbias.to(bias.dtype)


def gates(q: Tensor, k: Tensor, w: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """sigmoid(w), [B, Tq, H], and sigmoid(scale q . k + b), [B, Tq, H, Tkv]."""
    products = torch.einsum("bthd,bsd->bths", wide(q), wide(k))
    z = scale * products + wide(bias)[:, None]
    return wide(w).to(z.dtype).sigmoid(), z.sigmoid()


def keys_seen(q: Tensor, k: Tensor, causal: bool, q_offset: int) -> Tensor:
    """Which keys the rows of q see, [Tq, Tkv]: with ``causal`` those at their position and before
    it; the first row stands at ``q_offset``.
    """
    position = torch.arange(q.shape[1], device=q.device).unsqueeze(-1) + q_offset
    key = torch.arange(k.shape[1], device=q.device)
    return (key <= position) if causal else (key >= 0).expand(q.shape[1], -1)


def wide(x: Tensor) -> Tensor:
    """x in the precision of the statistics: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    bias: Tensor,
    variance_ema: Tensor | None = None,
    *,
    scale: float,
    law: str,
    k_base: int,
    k_min: int,
    k_max: int,
    sinks: int = 0,
    causal: bool = True,
    q_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(indices, count, variance, entropy) of the keys that each row selects; see the public
    function. entropy is that of the scores' softmax over log(n + 1).
    """
    scores = gated_indexer(q, k, w, bias, scale=scale, causal=causal, q_offset=q_offset)
    seen = keys_seen(q, k, causal, q_offset)
    counts: dict[str, Any] = dict(k_base=k_base, k_min=k_min, k_max=k_max, sinks=sinks)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The selection from scores [B, Tq, Tkv], of which each row may take those it has seen."""
    scores = scores.nan_to_num(nan=0.0)
    variance, entropy = spread(scores, seen)
    factor = law_factor(law, variance, entropy, variance_ema)
    count = (k_base * factor).floor().clamp(k_min, k_max).to(torch.int64)
    count = torch.minimum(count, seen.sum(-1))
    indices = greatest(scores, seen, count, k_max, sinks)
    return indices, count.to(torch.int32), variance, entropy


def greatest(scores: Tensor, seen: Tensor, count: Tensor, k_max: int, sinks: int) -> Tensor:
    """The ``count`` first keys of each row by descending score, then by ascending index, in k_max
    slots; sinks before all.
    """
    keys = scores.shape[-1]
    key = torch.arange(keys, device=scores.device)
    rank = scores.masked_fill(key < sinks, float("inf")).masked_fill(~seen, float("-inf"))
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    slot = torch.arange(k_max, device=scores.device)
    order = F.pad(order, (0, max(k_max - keys, 0)))[..., :k_max]
    # Slots that are not valid go last.
    chosen = torch.where(slot < count.unsqueeze(-1), order, keys).sort(-1).values
    return torch.where(chosen < keys, chosen, -1).to(torch.int32)


def spread(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
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
    some = seen.any(-1)
    return variance, torch.where(some, entropy / (visible + 1.0).log(), 0.0)


def law_factor(law: str, variance: Tensor, entropy: Tensor, variance_ema: Tensor | None) -> Tensor:
    """What k_base is multiplied with; without an average to compare with, every row is typical."""
    if law == "fixed":
        return torch.ones_like(variance)
    if law == "entropy":
        return 0.5 + entropy
    ratio = torch.ones_like(variance)
    if variance_ema is not None:
        known = variance_ema > 0.0
        ratio = torch.where(known, variance / variance_ema.clamp(min=1e-6), 1.0)
    return ratio if law == "proportional" else 0.5 + 1.0 / (1.0 + ratio)


def sparse_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of softmax(scale q k^T) v over the selected keys, indices [B, 1 or H, T, K]; see the
    public function.
    """
    p, lse = probabilities(wide(q), wide(k), indices, count, scale)
    o = torch.einsum("bhts,bshd->bthd", p, of_every_head(wide(v), q))
    return o.to(q.dtype).contiguous(), lse


def sparse_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradients of o and of lse."""
    p, _ = probabilities(wide(q), wide(k), indices, count, scale)
    dp = torch.einsum("bthd,bshd->bhts", wide(do), of_every_head(wide(v), q))
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - wide(dlse).unsqueeze(-1)
    ds = p * (dp - delta) * scale
    dq = torch.einsum("bhts,bshd->bthd", ds, of_every_head(wide(k), q))
    dk = torch.einsum("bhts,bthd->bshd", ds, wide(q))
    dv = torch.einsum("bhts,bthd->bshd", p, wide(do))
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def probabilities(
    q: Tensor, k: Tensor, indices: Tensor, count: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax over the selected keys, [B, H, T, Tkv], zero without any, and the log-sum-exp of
    their scores. A key that is selected twice counts twice.
    """
    times = times_selected(indices, count, k.shape[1])
    some = times.sum(-1, keepdim=True) > 0
    scores = torch.einsum("bthd,bshd->bhts", q, of_every_head(k, q)) * scale
    scores = torch.where(times > 0, scores, float("-inf"))
    # A row without keys takes part with scores of zero, so that no gradient is infinity less
    # infinity.
    scores = torch.where(some, scores, 0.0)
    highest = scores.amax(-1, keepdim=True).detach() if k.shape[1] else scores.sum(-1, keepdim=True)
    weight = torch.where(times > 0, (scores - highest).exp() * times.to(q.dtype), 0.0)
    total = torch.where(some, weight.sum(-1, keepdim=True), 1.0)
    lse = torch.where(some, total.log() + highest, float("-inf")).squeeze(-1)
    return weight / total, lse


def times_selected(indices: Tensor, count: Tensor | None, keys: int) -> Tensor:
    """How often each key is selected, [B, 1 or H, T, Tkv]."""
    there = (indices >= 0) & (indices < keys)
    if count is not None:
        slot = torch.arange(indices.shape[-1], device=indices.device)
        there = there & (slot < count.unsqueeze(-1))
    key = torch.where(there, indices, keys).long()
    times = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.int32, device=indices.device)
    return times.scatter_add(-1, key, torch.ones_like(key, dtype=torch.int32))[..., :keys]


def of_every_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each head of q, which share those of k and v in groups."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


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
    *,
    index_scale: float,
    scale: float,
    causal: bool = True,
    q_offset: int = 0,
) -> Tensor:
    """mean_t KL(p_t || softmax(temperature I_t)), p_t the mean of the heads' probabilities; see the
    public function.
    """
    counts = keys_counted(q, k, indices, count, causal, q_offset)
    p = attention_target(q, k, lse, counts, scale)
    places: dict[str, Any] = dict(scale=index_scale, causal=causal, q_offset=q_offset)
    log_softmax = log_probabilities(
        gated_indexer(q_index, k_index, w, bias, **places), temperature, counts
    )
    log_p = torch.where(p > 0, p, 1.0).log()
    return (p * (log_p - log_softmax)).sum() / max(q.shape[0] * q.shape[1], 1)


def indexer_kl_loss_slopes(
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
    *,
    index_scale: float,
    scale: float,
    causal: bool = True,
    q_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss's gradients for q_index, k_index, w, bias and temperature, in fp32."""
    counts = keys_counted(q, k, indices, count, causal, q_offset)
    p = attention_target(q, k, lse, counts, scale)
    places: dict[str, Any] = dict(scale=index_scale, causal=causal, q_offset=q_offset)
    operands = tuple(wide(x) for x in (q_index, k_index, w, bias))
    scores = gated_indexer(*operands, **places)
    softmax = log_probabilities(scores, temperature, counts).exp()
    share = 1.0 / max(q.shape[0] * q.shape[1], 1)
    asked = p.sum(-1, keepdim=True) > 0
    g = share * torch.where(counts & asked, softmax - p, 0.0)
    slope = (g * torch.where(counts, scores, 0.0)).sum()
    return *gated_indexer_backward(wide(temperature) * g, *operands, **places), slope


def keys_counted(
    q: Tensor,
    k: Tensor,
    indices: Tensor | None,
    count: Tensor | None,
    causal: bool,
    q_offset: int,
) -> Tensor:
    """Which keys the loss of each row counts, [B, T, Tkv]: those it sees, or has selected of
    them.
    """
    seen = keys_seen(q, k, causal, q_offset)
    if indices is None:
        return seen.expand(q.shape[0], -1, -1)
    return seen & (times_selected(indices, count, k.shape[1]) > 0)


def attention_target(q: Tensor, k: Tensor, lse: Tensor, counts: Tensor, scale: float) -> Tensor:
    """The heads' probabilities, their sum over the counted keys made 1, [B, T, Tkv]."""
    scores = torch.einsum("bthd,bshd->bhts", wide(q), of_every_head(wide(k), q)) * scale
    lse = wide(lse).unsqueeze(-1)
    counted = counts.unsqueeze(1) & (lse > float("-inf"))
    total = torch.where(counted, torch.where(counted, scores - lse, 0.0).exp(), 0.0).sum(1)
    mass = total.sum(-1, keepdim=True)
    return total / torch.where(mass > 0, mass, 1.0)


def log_probabilities(scores: Tensor, temperature: Tensor, counts: Tensor) -> Tensor:
    """log softmax(temperature I) over the counted keys, zero elsewhere."""
    x = torch.where(counts, scores, 0.0) * wide(temperature)
    some = counts.any(-1, keepdim=True)
    x = torch.where(counts | ~some, x, float("-inf")).log_softmax(-1)
    return torch.where(counts, x, 0.0)
