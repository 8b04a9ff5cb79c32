"""The family in plain torch: the specification, the yardstick of the tests, what a CPU runs."""

from __future__ import annotations

import torch

from .._core.precision import wide


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """y = factor * x, in fp32 (in fp64 for fp64 inputs), rounded once to x's dtype; contiguous."""
    return (factor * wide(x)).to(x.dtype).contiguous()
