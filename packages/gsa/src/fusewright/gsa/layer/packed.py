"""The next tokens of several sequences in one row, and in a row of each."""

from __future__ import annotations

import torch

from ..common.ranges import document_bounds
from .key_cache import KeyCache

Tensor = torch.Tensor


def sequences_of(
    x: Tensor, cu_seqlens: Tensor, most: int, cache: KeyCache
) -> tuple[Tensor, Tensor]:
    """Of tokens ``[1, T, C]`` those of each sequence of the cache, ``[B, most, C]``; and the mask
    of padding, which stands behind the tokens.
    """
    if cu_seqlens.numel() - 1 != cache.batches:
        raise ValueError(
            f"cu_seqlens must be [B + 1] for the {cache.batches} sequences of the cache, "
            f"got {tuple(cu_seqlens.shape)}"
        )
    bounds = document_bounds(cu_seqlens, x.shape[1]).unsqueeze(1)
    token = bounds[:-1] + torch.arange(most, device=x.device)
    mask = token < bounds[1:]
    found = x[0].index_select(0, token.clamp(max=x.shape[1] - 1).flatten())
    return found.view(*token.shape, x.shape[-1]), mask


def tokens_of(y: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Of ``[B, most, C]`` the tokens in one row again, zeros for those of no sequence."""
    batches, most = y.shape[:2]
    bounds = document_bounds(cu_seqlens, tokens)
    token = torch.arange(tokens, device=y.device)
    sequence = torch.searchsorted(bounds[1:], token, right=True).clamp(max=batches - 1)
    place = token - bounds[sequence]
    found = y.flatten(0, 1).index_select(0, sequence * most + place.clamp(0, most - 1))
    outside = (place < 0) | (token >= bounds[-1]) | (place >= most)
    return found.masked_fill(outside.unsqueeze(-1), 0.0).unsqueeze(0)
