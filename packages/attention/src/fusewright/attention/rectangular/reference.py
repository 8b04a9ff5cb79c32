"""rectangular_attention in plain torch: the specification, the yardstick of the tests and what a
CPU runs.

Computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the inputs' dtype; outputs are
contiguous. All scores are held at once, [B, H, Nq, M]. The backward pass stands here for the
op's derivatives, first and second.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.precision import wide
from ..common.reference import gradients, of_each_head, probabilities

Tensor = torch.Tensor


def rectangular_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """o = softmax(scale q k^T) v for each head; see the public function."""
    return outputs(q, k, v, key_lengths, sinks, scale, with_lse=False)[0]


def rectangular_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o, lse), lse = log(sum(exp(scale q k^T))) of each row, [B, H, Nq]."""
    return outputs(q, k, v, key_lengths, sinks, scale, with_lse=True)


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    *,
    with_lse: bool,
) -> tuple[Tensor, Any]:
    """(o, lse), lse None where it is not asked for."""
    present, k_wide, v_wide = without_absent_keys(k, v, key_lengths)
    k_wide, v_wide = of_each_head(q, k_wide, v_wide)
    options: dict[str, Any] = {"sinks": sinks, "with_lse": with_lse}
    p, lse = probabilities(wide(q), k_wide, of_all_rows(present), scale, **options)
    o = torch.einsum("bhnm,bmhd->bnhd", p, v_wide)
    return o.to(q.dtype).contiguous(), lse


def rectangular_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) from the gradients of o and of lse; dsinks is empty without sinks."""
    present, k_wide, v_wide = without_absent_keys(k, v, key_lengths)
    q_wide, do_wide = wide(q), wide(do)
    dq, dk, dv, dsinks = gradients(
        do_wide, dlse, q_wide, k_wide, v_wide, of_all_rows(present), scale, sinks
    )
    if present is not None:
        dk, dv = (torch.where(present[:, :, None, None], x, 0.0) for x in (dk, dv))
    dq, dk, dv = (x.to(q.dtype).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks.dtype)


def without_absent_keys(
    k: Tensor, v: Tensor, key_lengths: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which keys are present, [B, M], and keys and values with zeros elsewhere, in the precision of
    the statistics.
    """
    if key_lengths is None:
        return None, wide(k), wide(v)
    present = torch.arange(k.shape[1], device=k.device) < key_lengths.unsqueeze(-1)
    rows = present[:, :, None, None]
    return present, torch.where(rows, wide(k), 0.0), torch.where(rows, wide(v), 0.0)


def of_all_rows(present: Tensor | None) -> Tensor | None:
    """Which keys are present, [B, M], as which keys a row of a head sees, [B, 1, 1, M]."""
    return None if present is None else present[:, None, None, :]
