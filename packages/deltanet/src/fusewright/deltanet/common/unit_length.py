"""Rows of length 1, in plain torch."""

from __future__ import annotations

import torch

from .._core.precision import wide

# Added to the square of a row's length.
L2_EPS = 1e-6


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis."""
    rows = wide(x)
    return (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)
