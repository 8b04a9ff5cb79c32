"""Every op in plain torch: the specification, the yardstick of the tests and what a CPU runs.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype; outputs are
contiguous. It holds all scores at once, [B, H, Nq, M]. The backward pass stands here for the
derivatives of the ops, first and second.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def rectangular_attention(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None = None, *, scale: float
) -> Tensor:
    """o = softmax(scale q k^T) v for each head; see the public function."""
    return rectangular_attention_with_lse(q, k, v, key_lengths, scale=scale)[0]


def rectangular_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None = None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse), lse = log(sum(exp(scale q k^T))) of each row, [B, H, Nq]."""
    present, k_wide, v_wide = without_absent_keys(k, v, key_lengths)
    p, lse = probabilities(wide(q), k_wide, present, scale)
    o = torch.einsum("bhnm,bmhd->bnhd", p, v_wide)
    return o.to(q.dtype).contiguous(), lse


def rectangular_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradients of o and of lse."""
    present, k_wide, v_wide = without_absent_keys(k, v, key_lengths)
    q_wide, do_wide = wide(q), wide(do)
    p, _ = probabilities(q_wide, k_wide, present, scale)
    dp = torch.einsum("bnhd,bmhd->bhnm", do_wide, v_wide)
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - wide(dlse).unsqueeze(-1)
    ds = p * (dp - delta) * scale
    if present is not None:
        # Keys that are not there give nothing and get nothing, not even a NaN.
        ds = torch.where(present[:, None, None, :], ds, 0.0)
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, k_wide)
    dk = torch.einsum("bhnm,bnhd->bmhd", ds, q_wide)
    dv = torch.einsum("bhnm,bnhd->bmhd", p, do_wide)
    if present is not None:
        dk, dv = (torch.where(present[:, :, None, None], x, 0.0) for x in (dk, dv))
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv


def without_absent_keys(
    k: Tensor, v: Tensor, key_lengths: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which keys are there, [B, M], and keys and values with zeros elsewhere, in the precision of
    the statistics.
    """
    if key_lengths is None:
        return None, wide(k), wide(v)
    present = torch.arange(k.shape[1], device=k.device) < key_lengths.unsqueeze(-1)
    rows = present[:, :, None, None]
    return present, torch.where(rows, wide(k), 0.0), torch.where(rows, wide(v), 0.0)


def probabilities(
    q: Tensor, k: Tensor, present: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax of the scores over the keys that are there, zero without any; and the log-sum-exp."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
    if present is None and k.shape[1] > 0:
        return scores.softmax(-1), scores.logsumexp(-1)
    if present is None:
        present = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    some = present.any(-1)[:, None, None]
    scores = scores.masked_fill(~present[:, None, None, :], float("-inf"))
    # A task without keys takes part with scores of zero, so that no gradient is infinity less
    # infinity.
    scores = torch.where(some.unsqueeze(-1), scores, 0.0)
    p = torch.where(some.unsqueeze(-1), scores.softmax(-1), 0.0)
    return p, torch.where(some, scores.logsumexp(-1), float("-inf"))


def wide(x: Tensor) -> Tensor:
    """x in the precision of the statistics: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()
