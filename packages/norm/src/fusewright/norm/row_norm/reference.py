"""Norms of rows in plain torch: the specification, the yardstick of the tests and the CPU
implementation.

Statistics and products are computed in fp32 (in fp64 for fp64 inputs) and rounded once, to the
input's dtype; outputs are contiguous. Gradients are autograd's. The backward passes stand here for
the derivatives of the ops, first and second.
"""

from __future__ import annotations

import torch

from .._core.precision import wide


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last axis."""
    # Widened once, so that the gradient is rounded once too.
    x_wide = wide(x)
    x_hat = x_wide * rstd_of(x_wide, eps)
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
    total = rounded_sum(x, residual)
    return rms_norm(total, weight, eps=eps, weight_offset=weight_offset), total


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    activation: str = "silu",
) -> torch.Tensor:
    """y = rms_norm(x) * activation(gate), rounded once."""
    x_wide = wide(x)
    x_hat = x_wide * rstd_of(x_wide, eps)
    y = affine(x_hat, weight, None, weight_offset) * activated(wide(gate), activation)
    return y.to(x.dtype).contiguous()


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
    x_wide = wide(x)
    centered = x_wide - mean_of(x_wide)
    x_hat = centered * rstd_of(centered, eps)
    return affine(x_hat, weight, bias, 0.0).to(dtype or x.dtype).contiguous()


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual, rounded to x's dtype; y = layer_norm(s). Returns (y, s)."""
    total = rounded_sum(x, residual)
    return layer_norm(total, weight, bias, eps=eps, dtype=dtype), total


def rms_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, dweight) of rms_norm; ``dsum``, a gradient that reaches x by another path, is added
    to dx.
    """
    x_wide = wide(x)
    rstd = rstd_of(x_wide, eps)
    x_hat = x_wide * rstd
    dx_hat = affine(wide(dy), weight, None, weight_offset)
    dx = (dx_hat - x_hat * mean_of(dx_hat * x_hat)) * rstd
    if dsum is not None:
        dx = dx + wide(dsum)
    return dx.to(x.dtype).contiguous(), summed_over_rows(wide(dy) * x_hat, weight)


def rms_norm_gated_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    activation: str = "silu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dx, dgate, dweight) of rms_norm_gated."""
    x_wide, gate_wide = wide(x), wide(gate)
    normalised = affine(x_wide * rstd_of(x_wide, eps), weight, None, weight_offset)
    factor = torch.sigmoid(gate_wide)
    slope = factor * (1 - factor)
    if activation == "silu":
        slope = factor * (1 + gate_wide * (1 - factor))
    dgate = (wide(dy) * normalised * slope).to(gate.dtype).contiguous()
    dnormalised = wide(dy) * activated(gate_wide, activation)
    dx, dweight = rms_norm_backward(
        dnormalised, None, x, weight, eps=eps, weight_offset=weight_offset
    )
    return dx, dgate, dweight


def layer_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight, dbias) of layer_norm; ``dsum``, a gradient that reaches x by another path, is
    added to dx.
    """
    x_wide = wide(x)
    centered = x_wide - mean_of(x_wide)
    rstd = rstd_of(centered, eps)
    x_hat = centered * rstd
    dx_hat = affine(wide(dy), weight, None, 0.0)
    dx = (dx_hat - mean_of(dx_hat) - x_hat * mean_of(dx_hat * x_hat)) * rstd
    if dsum is not None:
        dx = dx + wide(dsum)
    return (
        dx.to(x.dtype).contiguous(),
        summed_over_rows(wide(dy) * x_hat, weight),
        summed_over_rows(wide(dy), bias),
    )


def rounded_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual, rounded to x's dtype, contiguous."""
    return (wide(x) + wide(residual)).to(x.dtype).contiguous()


def mean_of(x: torch.Tensor) -> torch.Tensor:
    """The mean of each row, the last axis kept with length 1."""
    return x.mean(-1, keepdim=True)


def summed_over_rows(x: torch.Tensor, vector: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of ``vector``, in its dtype; None where there is none."""
    if vector is None:
        return None
    return x.sum(tuple(range(x.ndim - 1))).to(vector.dtype) if x.ndim > 1 else x.to(vector.dtype)


def rstd_of(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps), the last axis kept with length 1."""
    return torch.rsqrt(mean_of(x.square()) + eps)


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


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """What a gate multiplies by: sigmoid(gate), or gate * sigmoid(gate)."""
    factor = torch.sigmoid(gate)
    return gate * factor if activation == "silu" else factor
