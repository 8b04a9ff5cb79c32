"""What the public functions make of their arguments."""

from __future__ import annotations

import math

import torch

from ._checks import check_same_dtype, checked_scale

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[Operands, float]:
    """q, k and v as autocast hands them to a matrix product, in one dtype; and the factor of the
    scores.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else checked_scale(scale)
    q, k, v = cast(q), cast(k), cast(v)
    check_same_dtype(q, k, v)
    return (q, k, v), scale


def cast(x: torch.Tensor) -> torch.Tensor:
    # Autocast knows no meta tensors.
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
