"""Selections that are timed: of neighbouring queries that select alike, and at random."""

from __future__ import annotations

import torch

SINKS, BLOCK, NEIGHBOURS, ROWS = 4, 32, 64, 1024
# Keys of a block of native sparse attention.
WHOLE = 64

Tensor = torch.Tensor


def selection(
    tokens: int, slots: int, kind: str, device: torch.device | str = "cuda"
) -> tuple[Tensor, Tensor]:
    """Indices ``[1, T, slots]`` and count ``[1, T]`` of causal queries, with four sinks: "random"
    ones, of which neighbouring queries share few, or "clustered", half of them in a window and half
    in blocks of 32 keys that 64 neighbouring queries have in common.
    """
    torch.manual_seed(1)
    indices = torch.empty(1, tokens, slots, dtype=torch.int32, device=device)
    key = torch.arange(tokens, device=device)
    for first in range(0, tokens, ROWS):
        row = torch.arange(first, first + ROWS, device=device)[:, None]
        score = torch.rand(ROWS, tokens, device=device)
        if kind == "clustered":
            blocks = torch.rand(ROWS // NEIGHBOURS, tokens // BLOCK, device=device)
            score *= 0.15
            score += blocks.repeat_interleave(NEIGHBOURS, 0).repeat_interleave(BLOCK, 1)
            score.masked_fill_(row - key < slots // 2, 3.0)
        score[:, :SINKS] = 4.0
        score.masked_fill_(key > row, -1.0)
        best = score.topk(slots, sorted=False)
        chosen = torch.where(best.values >= 0.0, best.indices, tokens).sort(-1).values
        indices[0, first : first + ROWS] = torch.where(chosen < tokens, chosen, -1)
    return indices, (indices >= 0).sum(-1).int()


def of_blocks(
    tokens: int, slots: int, device: torch.device | str = "cuda"
) -> tuple[Tensor, Tensor]:
    """Indices ``[1, T, slots]``, in their order, and count ``[1, T]`` of causal queries that select
    whole blocks of 64 keys, as in native sparse attention: the first, their own up to themselves,
    and others at random.
    """
    query = torch.arange(tokens, device=device)[:, None]
    own, block = query // WHOLE, torch.arange(-(-tokens // WHOLE), device=device)
    score = torch.rand(tokens, len(block), device=device)
    score[:, :1] = 2.0
    score.scatter_(1, own, 3.0).masked_fill_(block > own, -1.0)
    best = score.topk(min(slots // WHOLE, len(block)))
    # A query's own block is the last of its blocks, so that no padding stands between keys.
    chosen = torch.where(best.values >= 0.0, best.indices, len(block)).sort(-1).values
    keys = (chosen[..., None] * WHOLE + torch.arange(WHOLE, device=device)).flatten(1)
    keys = torch.where(keys <= query, keys, -1).int()
    indices = torch.nn.functional.pad(keys, (0, slots - keys.shape[1]), value=-1)[None]
    return indices, (indices >= 0).sum(-1).int()
