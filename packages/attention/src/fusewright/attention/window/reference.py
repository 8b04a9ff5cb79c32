"""sliding_window_attention in plain torch: the specification, the yardstick of the tests and what
a CPU runs.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype; outputs are
contiguous. All scores are held at once, [B, H, Nq, M]. The backward pass stands here for the
op's derivatives, first and second.

``bounds`` [B, N + 1] are of packed documents (``documents``). Zero times NaN is NaN: what is not
finite in a document, or in padding, is left out, so that its gradient reaches no other, and the
rows that see it are NaN for it.
"""

from __future__ import annotations

import torch

from .._core.precision import wide
from ..common.reference import gradients, of_each_head, probabilities

Tensor = torch.Tensor


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    prefix: int = 0,
    every: int = 1,
    bounds: Tensor | None = None,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """o = softmax(scale q k^T) v over the keys that a row sees; see the public function."""
    return sliding_window_attention_with_lse(
        q, k, v, window, prefix, every, bounds, scale=scale, sinks=sinks
    )[0]


def sliding_window_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    prefix: int = 0,
    every: int = 1,
    bounds: Tensor | None = None,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse), lse = log(sum(exp(scale q k^T))) of each row's keys, [B, H, Nq]."""
    seen = keys_seen(q, k, window, prefix, every, bounds)
    q_wide, (k_wide, v_wide) = wide(q), of_each_head(q, wide(k), wide(v))
    values = finite(v_wide)
    affected = sees_one(seen, strange(v_wide))
    if bounds is None:
        p, lse = probabilities(q_wide, k_wide, seen, scale, sinks)
        o = torch.einsum("bhnm,bmhd->bnhd", p, values)
    else:
        # Padding sees nothing, not even a sink.
        rows = seen.any(-1).mT  # [B, Nq, 1]
        p, lse = probabilities(finite(q_wide), finite(k_wide), seen, scale, sinks)
        o = torch.where(rows.unsqueeze(-1), torch.einsum("bhnm,bmhd->bnhd", p, values), 0.0)
        of_scores = rows & strange(q_wide) | sees_one(seen, strange(k_wide))
        lse = torch.where(of_scores.mT, float("nan"), lse)
        lse = torch.where(rows.mT, lse, float("-inf"))
        affected = affected | of_scores
    o = torch.where(affected.unsqueeze(-1), float("nan"), o)
    return o.to(q.dtype).contiguous(), lse


def sliding_window_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    prefix: int = 0,
    every: int = 1,
    bounds: Tensor | None = None,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) from the gradients of o and of lse; dsinks is empty without sinks."""
    seen = keys_seen(q, k, window, prefix, every, bounds)
    do, q_wide, k_wide, v_wide = (wide(x) for x in (do, q, k, v))
    if bounds is not None:
        rows, keys = (seen.any(axis)[:, 0, :, None, None] for axis in (-1, -2))
        do, q_wide = (torch.where(rows, x, 0.0) for x in (do, q_wide))
        k_wide, v_wide = (torch.where(keys, x, 0.0) for x in (k_wide, v_wide))
        if dlse is not None:
            dlse = torch.where(rows[..., 0].mT, dlse, 0.0)
    *grads, dsinks = gradients(do, dlse, q_wide, k_wide, v_wide, seen, scale, sinks)
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in grads)
    return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)


def finite(x: Tensor) -> Tensor:
    """Zero where a number is not finite."""
    return torch.where(x.isfinite(), x, 0.0)


def strange(x: Tensor) -> Tensor:
    """Which rows [B, rows, H] of x [B, rows, H, D] have a number that is not finite."""
    return ~x.isfinite().all(-1)


def sees_one(seen: Tensor, keys: Tensor) -> Tensor:
    """Which rows [B, Nq, H] see one of these keys [B, M, H]."""
    return ((seen.float() @ keys.float().mT.unsqueeze(-1)) > 0).squeeze(-1).mT


def keys_seen(
    q: Tensor, k: Tensor, window: int, prefix: int, every: int, bounds: Tensor | None = None
) -> Tensor:
    """Which keys the rows of q see, [Nq, M], or with bounds [B, 1, Nq, M]: the last row of q is
    that of the keys, and the one before it stands ``every`` rows further back.
    """
    queries, keys = q.shape[1], k.shape[1]
    key = torch.arange(keys, device=k.device)
    row = keys - 1 - every * torch.arange(queries - 1, -1, -1, device=k.device)
    distance = row.unsqueeze(-1) - key
    of_band = (key >= prefix) & (distance >= 0) & (distance < window)
    if bounds is None:
        return of_band | (key < prefix)
    # Of which document a key is, from 1 on; 0 and the last are padding.
    behind = (key - prefix).int().expand(bounds.shape[0], -1).contiguous()
    document = torch.searchsorted(bounds.contiguous(), behind, right=True)
    document = torch.where(document < bounds.shape[1], document, 0)
    own = document[:, row].unsqueeze(-1)
    of_band = of_band & (own == document.unsqueeze(1)) & (own > 0)
    of_prefix = (key < prefix) & ((row < prefix).unsqueeze(-1) | (own > 0))
    return (of_band | of_prefix).unsqueeze(1)
