"""Checks of arguments that the rule and the layer share, before any memory is touched."""

from __future__ import annotations

import torch

from .._core.checks import check_device

LENGTHS = (torch.int32, torch.int64)


def check_lengths(cu_seqlens: torch.Tensor, q: torch.Tensor) -> None:
    """cu_seqlens [N + 1] must be integers, and q one row."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in LENGTHS:
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with N at least 1, got {cu_seqlens.shape}")
    if q.shape[0] != 1:
        raise ValueError(f"with cu_seqlens q must have one row, B = 1, got {tuple(q.shape)}")
    check_device("cu_seqlens", cu_seqlens, "q", q)
