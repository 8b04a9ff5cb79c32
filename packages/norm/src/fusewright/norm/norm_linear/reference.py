"""A norm of rows and the linear layer behind it in plain torch: the specification, the yardstick of
the tests and the CPU implementation.

What the norm returns is rounded once, to the dtype of the linear layer's weight, and multiplied as
torch multiplies it. Gradients are autograd's; the backward pass stands here for the derivatives of
the op, first and second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide
from ..row_norm import reference as row_norm

Tensor = torch.Tensor


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
) -> Tensor:
    """y = layer_norm(x, norm_weight, norm_bias) weight^T + bias."""
    return norm_linear(x, norm_weight, norm_bias, weight, bias, eps, 0.0, center=True)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> Tensor:
    """y = rms_norm(x, norm_weight) weight^T + bias."""
    return norm_linear(x, norm_weight, None, weight, bias, eps, weight_offset, center=False)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    center: bool,
) -> Tensor:
    """Either of the two."""
    z = normalised(x, norm_weight, norm_bias, weight.dtype, eps, weight_offset, center)
    return F.linear(z, weight, bias).contiguous()


def normalised(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    weight_offset: float,
    center: bool,
) -> Tensor:
    """The rows that the linear layer multiplies, rounded to its dtype."""
    x_wide = wide(x)
    if center:
        x_wide = x_wide - row_norm.mean_of(x_wide)
    x_hat = x_wide * row_norm.rstd_of(x_wide, eps)
    return row_norm.affine(x_hat, norm_weight, norm_bias, weight_offset).to(dtype).contiguous()


def norm_linear_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    center: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Gradients of x, norm_weight, norm_bias, weight and bias."""
    dz = torch.matmul(dy, weight)
    if center:
        of_norm = row_norm.layer_norm_backward(dz, None, x, norm_weight, norm_bias, eps=eps)
    else:
        of_norm = (
            *row_norm.rms_norm_backward(
                dz, None, x, norm_weight, eps=eps, weight_offset=weight_offset
            ),
            None,
        )
    z = normalised(x, norm_weight, norm_bias, weight.dtype, eps, weight_offset, center)
    dweight = torch.mm(as_matrix(dy).mT, as_matrix(z))
    return *of_norm, dweight, row_norm.summed_over_rows(dy, bias)


def as_matrix(x: Tensor) -> Tensor:
    """All leading axes as one."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
