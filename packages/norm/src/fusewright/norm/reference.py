"""Every op of the package in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

Statistics and products are computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the
input's dtype; outputs are contiguous. Gradients are autograd's.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last axis."""
    x_hat = wide(x) * rstd_of(wide(x), eps)
    return affine(x_hat, weight, None, weight_offset).to(x.dtype).contiguous()


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual, rounded to x's dtype; y = rms_norm(s). Returns (y, s)."""
    total = (wide(x) + wide(residual)).to(x.dtype).contiguous()
    return rms_norm(total, weight, eps=eps, weight_offset=weight_offset), total


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis, with the biased
    variance.

    y is in ``dtype``, x's own where left out.
    """
    centered = wide(x) - wide(x).mean(-1, keepdim=True)
    x_hat = centered * rstd_of(centered, eps)
    return affine(x_hat, weight, bias, 0.0).to(dtype or x.dtype).contiguous()


def rstd_of(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps), the last axis kept with length 1."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def affine(
    x_hat: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_offset: float,
) -> torch.Tensor:
    """x_hat * (weight + weight_offset) + bias, in the precision of the statistics."""
    if weight is not None:
        x_hat = x_hat * (wide(weight) + weight_offset)
    if bias is not None:
        x_hat = x_hat + wide(bias)
    return x_hat


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the precision of the statistics: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()
