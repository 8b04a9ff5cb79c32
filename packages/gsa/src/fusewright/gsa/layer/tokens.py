"""Which of a layer's tokens belong together: documents in one row, and padding."""

from __future__ import annotations

import torch

from .._core.checks import check_cu_seqlens, check_mask
from ..common.ranges import ranges_of_documents

Tensor = torch.Tensor


def check_tokens(
    x: Tensor, width: int, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> None:
    """x [B, T, width], mask [B, T], cu_seqlens [N + 1] over the tokens of one row."""
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"x must be [batch, tokens, {width}], got {tuple(x.shape)}")
    if mask is not None:
        check_mask(mask, x)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x)


def ranges_of_tokens(
    batches: int, tokens: int, mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor | None:
    """Ranges ``[B, T, 2]`` of each token: those of its document, or row, from the first token where
    the mask is True to the last one. Padding sees nothing. None where there is neither.
    """
    if cu_seqlens is not None:
        ranges = ranges_of_documents(cu_seqlens, tokens, tokens, 0)
        return ranges if mask is None else without_padding(ranges, mask)
    if mask is None:
        return None
    whole = tokens * torch.arange(2, device=mask.device)
    return without_padding(whole.expand(batches, tokens, 2), mask)


def without_padding(ranges: Tensor, mask: Tensor) -> Tensor:
    """Ranges of documents less the padding at their beginnings and ends."""
    tokens = mask.shape[1]
    document, end = ranges.unbind(-1)
    mask = mask & (document < end)
    # A document is known by its first token.
    document = document.long()
    place = torch.arange(tokens, device=mask.device).expand_as(mask)
    none = place.new_full((len(mask), tokens + 1), tokens)
    first = none.scatter_reduce(1, document, place.where(mask, tokens), "amin")
    last = torch.zeros_like(none).scatter_reduce(1, document, (place + 1).where(mask, 0), "amax")
    first, last = (x.gather(1, document) for x in (first, last))
    inside = (place >= first) & (place < last)
    # Those of padding are empty; neither number decreases in the order of the tokens.
    return torch.stack([x.where(inside, place) for x in (first, last)], -1).int()


def places_of(tokens: int, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, T]``: how many tokens of its own document stand before each token, and whether it is
    padding.
    """
    first, last = ranges.unbind(-1)
    place = torch.arange(tokens, device=ranges.device)
    return (place - first).clamp(min=0), first >= last
