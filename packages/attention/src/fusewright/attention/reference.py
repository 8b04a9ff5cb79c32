"""Every op in plain torch: the specification, the yardstick of the tests and what a CPU runs.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype; outputs are
contiguous. Attention holds all scores at once, [B, H, Nq, M]. The backward passes stand here for
the derivatives of the ops, first and second.
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
    p, lse = probabilities(wide(q), k_wide, of_all_rows(present), scale)
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
    dq, dk, dv = gradients(do_wide, dlse, q_wide, k_wide, v_wide, of_all_rows(present), scale)
    if present is not None:
        dk, dv = (torch.where(present[:, :, None, None], x, 0.0) for x in (dk, dv))
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, prefix: int = 0, every: int = 1, *, scale: float
) -> Tensor:
    """o = softmax(scale q k^T) v over the keys that a row sees; see the public function."""
    return sliding_window_attention_with_lse(q, k, v, window, prefix, every, scale=scale)[0]


def sliding_window_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, window: int, prefix: int = 0, every: int = 1, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse), lse = log(sum(exp(scale q k^T))) of each row's keys, [B, H, Nq]."""
    seen = keys_seen(q, k, window, prefix, every)
    p, lse = probabilities(wide(q), wide(k), seen, scale)
    # Zero times NaN is NaN: a value that is not finite is left out, and the rows that see it are
    # NaN for it.
    v_wide = wide(v)
    finite = v_wide.isfinite()
    o = torch.einsum("bhnm,bmhd->bnhd", p, torch.where(finite, v_wide, 0.0))
    strange = (~finite).any(-1).to(o.dtype)
    met = torch.einsum("nm,bmh->bnh", seen.to(o.dtype), strange) > 0
    o = torch.where(met.unsqueeze(-1), float("nan"), o)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradients of o and of lse."""
    seen = keys_seen(q, k, window, prefix, every)
    found = gradients(wide(do), dlse, wide(q), wide(k), wide(v), seen, scale)
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in found)
    return dq, dk, dv


def rotary(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    beside: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor:
    """Rows turned by the angles of their tokens, those beside them between, after a prefix; see the
    public function.
    """
    joint = turned(rows, cos, sin)
    if beside is not None:
        joint = torch.stack([joint, turned(beside, cos, sin)], 2).flatten(1, 2)
    if prefix is not None:
        joint = torch.cat([prefix.expand(len(rows), *prefix.shape[-4:]), joint], 1)
    return joint.contiguous()


def rotary_backward(
    djoint: Tensor, cos: Tensor, sin: Tensor, beside: bool, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(drows, dbeside, dprefix): rows are turned back, and a shared prefix gets the sum of its
    gradients over the batch. The second is empty without rows ``beside`` others.
    """
    tokens = len(cos) * (1 + beside)
    dprefix, dturned = djoint.split((djoint.shape[1] - tokens, tokens), 1)
    back = turned(dturned, *(x.repeat_interleave(1 + beside, 0) for x in (cos, -sin)))
    dbeside = back[:, 1::2].contiguous() if beside else djoint.new_empty(0)
    dprefix = wide(dprefix).sum(0).to(djoint.dtype) if shared else dprefix.clone()
    return back[:, :: 1 + beside].contiguous(), dbeside, dprefix.contiguous()


def turned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of columns (i, i + D / 2) of the first kind turned by the angle of the token; the
    second as it is.
    """
    first, *others = rows.split(1, 2)
    x, y = wide(first).chunk(2, -1)
    cos, sin = (angles[:, None, None] for angles in (cos, sin))
    first = torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(rows.dtype)
    return torch.cat([first, *others], 2) if others else first


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


def gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), the probabilities computed anew."""
    p, _ = probabilities(q, k, seen, scale)
    dp = torch.einsum("bnhd,bmhd->bhnm", do, v)
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - wide(dlse).unsqueeze(-1)
    ds = p * (dp - delta) * scale
    if seen is not None:
        # Keys that a row does not see give it nothing and get nothing, not even a NaN.
        ds = torch.where(seen, ds, 0.0)
    dq = torch.einsum("bhnm,bmhd->bnhd", ds, k)
    dk = torch.einsum("bhnm,bnhd->bmhd", ds, q)
    dv = torch.einsum("bhnm,bnhd->bmhd", p, do)
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


def of_all_rows(present: Tensor | None) -> Tensor | None:
    """Which keys are there, [B, M], as which of them a row of a head sees, [B, 1, 1, M]."""
    return None if present is None else present[:, None, None, :]


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
    # A row without keys takes part with scores of zero, so that no gradient is infinity less
    # infinity.
    scores = torch.where(some.unsqueeze(-1), scores, 0.0)
    p = torch.where(some.unsqueeze(-1), scores.softmax(-1), 0.0)
    return p, torch.where(some, scores.logsumexp(-1), float("-inf"))


def wide(x: Tensor) -> Tensor:
    """x in the precision of the statistics: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()
