"""The norm of gradients and their clipping in plain torch.

norm = sqrt(sum g^2)    g' = g min(1, max_norm / (norm + 1e-6))
"""

from __future__ import annotations

import torch

from .._core.precision import wide_dtype
from ..common.placement import local, mesh_of
from ..common.step import square_of

Tensor = torch.Tensor


class ReferenceGradients:
    """Gradients on one device."""

    def __init__(self, gradients: list[Tensor], device: torch.device) -> None:
        self.gradients, self.device = gradients, device

    def squares(self) -> list:
        """Sums of squares in fp64, as ``total_squares`` takes them."""
        return [(mesh_of(g), square_of(local(g)).view(1)) for g in self.gradients]

    def norm_of(self, squares: Tensor) -> Tensor:
        return squares.sum().sqrt().float()

    def clip(self, squares: Tensor, max_norm: float) -> Tensor:
        """Scale in place; returns the norm."""
        norm = squares.sum().sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in map(local, self.gradients):
            wide = wide_dtype(g)
            g.copy_(g.to(wide) * factor.to(wide))
        return norm.float()
