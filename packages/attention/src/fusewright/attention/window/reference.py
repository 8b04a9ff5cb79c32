"""sliding_window_attention in plain torch: the specification, the yardstick of the tests and what
a CPU runs.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype; outputs are
contiguous. All scores are held at once, [B, H, Nq, M]. The backward pass stands here for the
op's derivatives, first and second.
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
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """o = softmax(scale q k^T) v over the keys that a row sees; see the public function."""
    return sliding_window_attention_with_lse(
        q, k, v, window, prefix, every, scale=scale, sinks=sinks
    )[0]


def sliding_window_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    prefix: int = 0,
    every: int = 1,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse), lse = log(sum(exp(scale q k^T))) of each row's keys, [B, H, Nq]."""
    seen = keys_seen(q, k, window, prefix, every)
    k_wide, v_wide = of_each_head(q, wide(k), wide(v))
    p, lse = probabilities(wide(q), k_wide, seen, scale, sinks)
    # Zero times NaN is NaN: a value that is not finite is left out, and the rows that see it are
    # NaN for it.
    finite = v_wide.isfinite()
    o = torch.einsum("bhnm,bmhd->bnhd", p, torch.where(finite, v_wide, 0.0))
    not_finite = (~finite).any(-1).to(o.dtype)  # [B, M, H]
    affected = torch.einsum("nm,bmh->bnh", seen.to(o.dtype), not_finite) > 0
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
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) from the gradients of o and of lse; dsinks is empty without sinks."""
    seen = keys_seen(q, k, window, prefix, every)
    *grads, dsinks = gradients(wide(do), dlse, wide(q), wide(k), wide(v), seen, scale, sinks)
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in grads)
    return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)


def keys_seen(q: Tensor, k: Tensor, window: int, prefix: int, every: int) -> Tensor:
    """Which keys the rows of q see, [Nq, M]: the last row of q is that of the keys, and the one
    before it stands ``every`` rows further back.
    """
    queries, keys = q.shape[1], k.shape[1]
    key = torch.arange(keys, device=k.device)
    row = keys - 1 - every * torch.arange(queries - 1, -1, -1, device=k.device)
    distance = row.unsqueeze(-1) - key
    of_band = (key >= prefix) & (distance >= 0) & (distance < window)
    return of_band | (key < prefix)
