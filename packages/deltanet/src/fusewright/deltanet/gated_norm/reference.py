"""The gated norm in plain torch: the specification, the yardstick of the tests and the CPU
implementation. Everything is computed in fp32 (in fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide
from ..common.gradients import gradients

Tensor = torch.Tensor


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """o / sqrt(mean(o^2) + eps) weight silu(gate), over the last axis, in o's dtype."""
    normed = F.rms_norm(wide(o), o.shape[-1:], None, eps) * weight
    if gate is not None:
        normed = normed * F.silu(wide(gate))
    return normed.to(o.dtype)


def gated_norm_backward(
    dy: Tensor, o: Tensor, weight: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Gradients of o, weight and gate."""

    def forward(o: Tensor, weight: Tensor, gate: Tensor | None) -> tuple[Tensor]:
        return (gated_norm(o, weight, gate, eps),)

    return gradients(forward, (o, weight, gate), (dy,), like=o)
