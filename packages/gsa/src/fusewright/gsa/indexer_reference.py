"""The indexer's scores in plain torch; see :mod:`reference`."""

from __future__ import annotations

import torch

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
    z = scale * products + bias.to(products.dtype)[:, None]
    return w.to(z.dtype).sigmoid(), z.sigmoid()


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
