"""What sparse_attention alone checks of its arguments."""

from __future__ import annotations

import torch

from .._core.checks import checked_count

Tensor = torch.Tensor


def checked_dense_below(dense_below: int, q: Tensor, k: Tensor) -> bool:
    """Whether attention to these keys is to be dense."""
    checked_count("dense_below", dense_below, lowest=0)
    if not dense_below or k.shape[1] >= dense_below:
        return False
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            f"dense_below asks for as many keys as queries at least, got {q.shape[1]} queries and "
            f"{k.shape[1]} keys"
        )
    return True


def check_selected(indices: Tensor, count: Tensor | None, keys: int) -> None:
    """In the slots that count, of indices [B, R, T, K], must be keys or -1, and no key twice."""
    slot = torch.arange(indices.shape[-1], device=indices.device)
    counts = slot < (indices.shape[-1] if count is None else count.unsqueeze(-1))
    outside = counts & ((indices < -1) | (indices >= keys))
    for place in outside.nonzero()[:1].tolist():  # sync: check=True says that it waits
        index = indices[tuple(place)].item()  # sync: of what is about to be refused
        raise ValueError(
            f"indices must be from -1 to {keys - 1}, got {index} at [batch, head, query, slot] "
            f"{place}"
        )
    # Slots without a key get numbers that differ from each other.
    ordered = torch.where(counts & (indices >= 0), indices, -1 - slot).sort(-1).values
    twice = (ordered.diff(dim=-1) == 0).nonzero()[:1]
    for batch, head, query, slot in twice.tolist():  # sync: as above
        key = ordered[batch, head, query, slot].item()  # sync: of what is about to be refused
        raise ValueError(
            f"the keys of a query must differ, got {key} twice at [batch, head, query] "
            f"{[batch, head, query]}"
        )
