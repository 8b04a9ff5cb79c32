"""Which keys each row may see, beside what causality leaves: documents in one row, padding, caches
of different lengths.

Ranges are ``[B, Tq, 2]`` in int32: a row may see the keys from the first number to before the
second. Their contents are never read on the host.
"""

from __future__ import annotations

import torch

from .._core.checks import check_cu_seqlens, check_device, check_integers

Tensor = torch.Tensor


def checked_ranges(
    cu_seqlens: Tensor | None, key_ranges: Tensor | None, q: Tensor, keys: int, q_offset: int
) -> Tensor | None:
    """The ranges of q's rows, contiguous and within the keys; None: rows may see all of them."""
    if cu_seqlens is not None:
        if key_ranges is not None:
            raise ValueError("one of cu_seqlens and key_ranges must be given, got both")
        check_cu_seqlens(cu_seqlens, q)
        return ranges_of_documents(cu_seqlens, q.shape[1], keys, q_offset)
    if key_ranges is None:
        return None
    check_integers("key_ranges", key_ranges)
    wanted = (*q.shape[:2], 2)
    if tuple(key_ranges.shape) != wanted:
        raise ValueError(f"key_ranges must have shape {wanted}, got {tuple(key_ranges.shape)}")
    check_device("key_ranges", key_ranges, "q", q)
    return key_ranges.clamp(0, keys).int().contiguous()


def ranges_of_documents(cu_seqlens: Tensor, rows: int, keys: int, first_row: int) -> Tensor:
    """Ranges ``[1, rows, 2]`` of the rows from ``first_row`` on: each sees its own document; one
    that lies in none sees nothing.
    """
    place = first_row + torch.arange(rows, device=cu_seqlens.device)
    bounds = document_bounds(cu_seqlens, keys)
    document = torch.searchsorted(bounds, place, right=True)
    # Before the first document and behind the last one, nothing.
    ends = torch.cat([bounds[:1], bounds, bounds[-1:]])
    return torch.stack([ends[document], ends[document + 1]], -1).int().unsqueeze(0)


def document_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Where documents begin and end: no check has read whether that is in order."""
    return cu_seqlens.clamp(0, tokens).cummax(0).values


def rows_seeing(ranges: Tensor, keys: int, tile: int) -> Tensor:
    """``[B, tiles, 2]``: no row before the first and from the second on may see a key of a tile.
    Where neither number of the ranges decreases from row to row, all others may, but for causality.
    """
    first, last = ranges.unbind(-1)
    some = first < last
    # The least of what follows, and the greatest so far.
    least = torch.where(some, first, keys).flip(1).cummin(1).values.flip(1).contiguous()
    greatest = torch.where(some, last, 0).cummax(1).values.contiguous()
    key = torch.arange(0, keys, tile, device=ranges.device, dtype=torch.int32)
    of_tiles = (greatest, key), (least, (key + tile - 1).clamp(max=keys - 1))
    begin, end = (
        torch.searchsorted(
            numbers, key.expand(len(ranges), -1).contiguous(), right=True, out_int32=True
        )
        for numbers, key in of_tiles
    )
    return torch.stack([begin, end], -1)


def rows_that_see(ranges: Tensor, causal: bool, q_offset: int) -> Tensor:
    """How many rows see a key, at least 1."""
    first, last = ranges.unbind(-1)
    if causal:
        position = q_offset + torch.arange(ranges.shape[1], device=ranges.device)
        last = last.minimum(position + 1)
    return (first < last).sum().clamp(min=1)
