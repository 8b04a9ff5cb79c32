"""Selections that are timed: of neighbouring queries that select alike, and at random."""

from __future__ import annotations

import torch

SINKS, BLOCK, NEIGHBOURS, ROWS = 4, 32, 64, 1024

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
