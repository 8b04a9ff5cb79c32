"""Attention to the keys that rows see, and its gradients, in plain torch, for the references.

s = scale q k^T,  p = softmax(s),  o = p v
dp = do v^T,  ds = p * (dp - delta),  delta = rowsum(p * dp) - dlse
dq = scale ds k,  dk = scale ds^T q,  dv = p^T do,  dsink = -sum(exp(sink - lse) * delta)
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.precision import wide
from .._core.registration import empty_grad

Tensor = torch.Tensor


def probabilities(
    q: Tensor,
    k: Tensor,
    seen: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    *,
    with_lse: bool = True,
) -> tuple[Tensor, Any]:
    """softmax of the scores over the keys that a row sees, zero without any; and the log-sum-exp,
    None where it is not asked for: it takes longer than the softmax.
    ``seen`` is broadcast to the scores; None: every key. k has the heads of q. ``sinks``
    are one score more of each row, for a key that has no value; minus infinity is none.
    """
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k).mul_(scale)
    if sinks is not None:
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        last = wide(sinks).to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, last], -1)
        some = scores.ne(float("-inf")).any(-1)
        p, lse = of_some_rows(scores, some, with_lse)
        return p[..., :-1], lse
    if seen is None and k.shape[1] > 0:
        return scores.softmax(-1), scores.logsumexp(-1) if with_lse else None
    if seen is None:
        seen = torch.ones(1, k.shape[1], dtype=torch.bool, device=k.device)
    some = seen.any(-1)
    return of_some_rows(scores.masked_fill(~seen, float("-inf")), some, with_lse)


def of_some_rows(scores: Tensor, some: Tensor, with_lse: bool) -> tuple[Tensor, Any]:
    """softmax and log-sum-exp of ``some`` rows; of the others, without a score, zero and minus
    infinity.
    """
    # They get scores of zero, so that no gradient is infinity minus infinity.
    scores = torch.where(some.unsqueeze(-1), scores, 0.0)
    p = torch.where(some.unsqueeze(-1), scores.softmax(-1), 0.0)
    return p, torch.where(some, scores.logsumexp(-1), float("-inf")) if with_lse else None


def gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks), the probabilities recomputed; dsinks is empty without sinks. Heads of q
    may share keys: dk and dv are sums over them.
    """
    key_heads = k.shape[2]
    k, v = of_each_head(q, k, v)
    p, lse = probabilities(q, k, seen, scale, sinks, with_lse=sinks is not None)
    dp = torch.einsum("bnhd,bmhd->bhnm", do, v)
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - wide(dlse).unsqueeze(-1)
    dsinks = empty_grad(q)
    if sinks is not None:
        # A row without a score has no log-sum-exp that could be subtracted from minus infinity.
        finite = torch.where(lse == float("-inf"), 0.0, lse)
        of_sinks = (wide(sinks).to(lse.dtype)[:, None] - finite).exp().unsqueeze(-1)
        dsinks = -(of_sinks * delta).sum((0, 2, 3))
    ds = p * (dp - delta) * scale
    if seen is not None:
        # A key that a row does not see adds nothing to its gradient and gets none, not even a NaN.
        ds = torch.where(seen, ds, 0.0)
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, k)
    dk = torch.einsum("bhnm,bnhd->bmhd", ds, q)
    dv = torch.einsum("bhnm,bnhd->bmhd", p, do)
    if key_heads != q.shape[2]:
        dk, dv = (x.unflatten(2, (key_heads, -1)).sum(3) for x in (dk, dv))
    return dq, dk, dv, dsinks


def of_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as each head of q reads them: head h those of head h // (H / G)."""
    heads, key_heads = q.shape[2], k.shape[2]
    if heads == key_heads:
        return k, v
    k, v = (x.repeat_interleave(heads // key_heads, 2) for x in (k, v))
    return k, v
