"""Attention to the keys that rows see, and its gradients, in plain torch, for the references.

s = scale q k^T,  p = softmax(s),  o = p v
dp = do v^T,  ds = p * (dp - delta),  delta = rowsum(p * dp) - dlse
dq = scale ds k,  dk = scale ds^T q,  dv = p^T do
"""

from __future__ import annotations

import torch

from .._core.precision import wide

Tensor = torch.Tensor


def probabilities(q: Tensor, k: Tensor, seen: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax of the scores over the keys that a row sees, zero without any; and the log-sum-exp.
    ``seen`` is broadcast to the scores; None: every key.
    """
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if seen is None and k.shape[1] > 0:
        return scores.softmax(-1), scores.logsumexp(-1)
    if seen is None:
        seen = torch.ones(1, k.shape[1], dtype=torch.bool, device=k.device)
    some = seen.any(-1)
    scores = scores.masked_fill(~seen, float("-inf"))
    # A row without keys gets scores of zero, so that no gradient is infinity minus infinity.
    scores = torch.where(some.unsqueeze(-1), scores, 0.0)
    p = torch.where(some.unsqueeze(-1), scores.softmax(-1), 0.0)
    return p, torch.where(some, scores.logsumexp(-1), float("-inf"))


def gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), the probabilities recomputed."""
    p, _ = probabilities(q, k, seen, scale)
    dp = torch.einsum("bnhd,bmhd->bhnm", do, v)
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - wide(dlse).unsqueeze(-1)
    ds = p * (dp - delta) * scale
    if seen is not None:
        # A key that a row does not see adds nothing to its gradient and gets none, not even a NaN.
        ds = torch.where(seen, ds, 0.0)
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, k)
    dk = torch.einsum("bhnm,bnhd->bmhd", ds, q)
    dv = torch.einsum("bhnm,bnhd->bmhd", p, do)
    return dq, dk, dv
