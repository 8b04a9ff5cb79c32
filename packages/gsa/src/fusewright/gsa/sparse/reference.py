"""Attention to selected keys in plain torch: the specification, the yardstick of the tests and the
CPU implementation.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype. All scores of a
call are in memory at once.
"""

from __future__ import annotations

import torch

from .._core.precision import wide

Tensor = torch.Tensor


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
    o = torch.einsum("bhts,bshd->bthd", p, of_each_head(wide(v), q))
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
    """(dq, dk, dv) from the gradients of o and of lse.

    Written out: what autograd keeps of the forward pass would take second derivatives, which
    differentiate this, 40 % more memory.
    """
    p, lse = probabilities(wide(q), wide(k), indices, count, scale)
    dp = torch.einsum("bthd,bshd->bhts", wide(do), of_each_head(wide(v), q))
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        # That of no keys is minus infinity, and its gradient may be infinite, too.
        dlse = torch.where(lse == float("-inf"), 0.0, wide(dlse))
        delta = delta - dlse.unsqueeze(-1)
    ds = p * (dp - delta) * scale
    dq = torch.einsum("bhts,bshd->bthd", ds, of_each_head(wide(k), q))
    dk = torch.einsum("bhts,bthd->bshd", ds, wide(q))
    dv = torch.einsum("bhts,bthd->bshd", p, wide(do))
    dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def probabilities(
    q: Tensor, k: Tensor, indices: Tensor, count: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax over the selected keys, [B, H, T, Tkv], zero without any, and the log-sum-exp of
    their scores. A key that is selected twice counts twice; scores of -inf alone are no keys.
    """
    times = times_selected(indices, count, k.shape[1])
    scores = torch.einsum("bthd,bshd->bhts", q, of_each_head(k, q)) * scale
    scores = torch.where(times > 0, scores, float("-inf"))
    highest = scores.amax(-1, keepdim=True).detach() if k.shape[1] else scores.sum(-1, keepdim=True)
    no_keys = (highest == float("-inf")) | (k.shape[1] == 0)
    # Infinity less infinity would be NaN, in the gradients too.
    highest = torch.where(no_keys, 0.0, highest)
    weight = torch.where(times > 0, (scores - highest).exp() * times.to(q.dtype), 0.0)
    total = torch.where(no_keys, 1.0, weight.sum(-1, keepdim=True))
    lse = torch.where(no_keys, float("-inf"), total.log() + highest).squeeze(-1)
    return weight / total, lse


def times_selected(indices: Tensor, count: Tensor | None, keys: int) -> Tensor:
    """How often each key is selected, [B, 1 or H, T, Tkv]."""
    valid = (indices >= 0) & (indices < keys)
    if count is not None:
        slot = torch.arange(indices.shape[-1], device=indices.device)
        valid = valid & (slot < count.unsqueeze(-1))
    key = torch.where(valid, indices, keys).long()
    times = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.int32, device=indices.device)
    return times.scatter_add(-1, key, torch.ones_like(key, dtype=torch.int32))[..., :keys]


def of_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each head of q, which share those of k and v in groups."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)
