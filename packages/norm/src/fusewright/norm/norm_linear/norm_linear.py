r"""The op of a norm of rows and the linear layer behind it, which layer_norm_linear and
rms_norm_linear call.

    z = norm(x),  rounded to weight's dtype        y = z weight^T + bias

The backward pass:

    dz      = dy weight,  rounded, the gradient that the norm receives
    dweight = dy^T z
    dbias   = sum over rows of dy

and those of the norm are what layer_norm and rms_norm say. Saved for it: x, the weights and biases,
and the norm's statistics in fp32, mean and rstd or rstd alone, one number a row each. z is not: it
is computed again for dweight.
"""

from __future__ import annotations

import torch

from .._core.checks import check_device, check_floating
from .._core.precision import autocasts, wide, without_autocast
from .._core.registration import Derivative, Op, empty_grad
from ..row_norm import reference as row_norm
from . import launch, reference

Tensor = torch.Tensor


def _forward_triton(x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center):
    y, mean, rstd = launch.norm_linear_forward(
        x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center
    )
    return y, rstd.new_empty(0) if mean is None else mean, rstd


def _forward_reference(x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center):
    y = reference.norm_linear(x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center)
    x_wide = wide(x)
    mean = x_wide.new_empty(0)
    if center:
        mean = row_norm.mean_of(x_wide)
        x_wide = x_wide - mean
        mean = mean.squeeze(-1)
    rstd = row_norm.rstd_of(x_wide, eps).squeeze(-1)
    return y, mean.float(), rstd.float()


def _forward_fake(x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center):
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if center else rstd.new_empty(0)
    return weight.new_empty((*x.shape[:-1], weight.shape[0])), mean, rstd


def _backward_triton(
    dy, x, norm_weight, norm_bias, weight, bias, mean, rstd, eps, weight_offset, center, *wanted
):
    return launch.norm_linear_backward(
        *(dy, x, norm_weight, norm_bias, weight, bias, mean if center else None, rstd),
        *(eps, weight_offset, wanted),
    )


def _backward_reference(
    dy, x, norm_weight, norm_bias, weight, bias, mean, rstd, eps, weight_offset, center, *wanted
):
    grads = reference.norm_linear_backward(
        dy, x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center
    )
    return tuple(
        grad if asked else empty_grad(x) for grad, asked in zip(grads, wanted, strict=True)
    )


def _backward_fake(
    dy, x, norm_weight, norm_bias, weight, bias, mean, rstd, eps, weight_offset, center, *wanted
):
    operands = x, norm_weight, norm_bias, weight, bias
    # The norm's gradients come together.
    asked = any(wanted[:3]), *wanted[1:]
    return tuple(
        each.new_empty(each.shape) if grad else empty_grad(x)
        for each, grad in zip(operands, asked, strict=True)
    )


_forward = Op(
    "norm_linear(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor weight, Tensor? bias,"
    " float eps, float weight_offset, bool center) -> (Tensor y, Tensor mean, Tensor rstd)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    "norm_linear_backward(Tensor dy, Tensor x, Tensor? norm_weight, Tensor? norm_bias,"
    " Tensor weight, Tensor? bias, Tensor mean, Tensor rstd, float eps, float weight_offset,"
    " bool center, bool x_grad, bool norm_weight_grad, bool norm_bias_grad, bool weight_grad,"
    " bool bias_grad) -> (Tensor dx, Tensor dnorm_weight, Tensor dnorm_bias, Tensor dweight,"
    " Tensor dbias)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("mean", "rstd")


@_forward.derivative
class _NormLinear(Derivative):
    @staticmethod
    def forward(ctx, run, x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center):
        y, mean, rstd = run(x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias, mean, rstd)
        ctx.options = eps, weight_offset, center
        ctx.set_materialize_grads(False)
        return y, *_forward.statistics(ctx, run, mean, rstd)

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 9
        wanted = ctx.needs_input_grad[1:6]
        grads = _backward(dy, *ctx.saved_tensors, *ctx.options, *wanted)
        asked = (grad if w else None for grad, w in zip(grads, wanted, strict=True))
        return None, *asked, None, None, None


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    center: bool,
    kernels: bool,
) -> Tensor:
    """y by the op, or in plain torch; under autocast in its dtype, as of torch's linear."""
    if autocasts(x.device.type) and torch.float64 not in (x.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(x.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    with without_autocast(x.device):
        if kernels:
            return _forward(x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center)[0]
        return reference.norm_linear(
            x, norm_weight, norm_bias, weight, bias, eps, weight_offset, center
        )


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise where a linear layer's weight or bias does not fit rows of x, or each other."""
    check_floating("weight", weight)
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must have shape (M, {x.shape[-1]}), one column for each of x, "
            f"got {tuple(weight.shape)}"
        )
    check_device("weight", weight, "x", x)
    if (weight.dtype == torch.float64) != (x.dtype == torch.float64):
        raise ValueError(
            f"weight and x must both be float64 or neither, got {weight.dtype} and {x.dtype}"
        )
    if bias is None:
        return
    check_floating("bias", bias)
    if bias.ndim != 1 or bias.shape[0] != weight.shape[0]:
        raise ValueError(
            f"bias must have shape ({weight.shape[0]},), one number for each row of weight, "
            f"got {tuple(bias.shape)}"
        )
    check_device("bias", bias, "x", x)
    if bias.dtype != weight.dtype:
        raise ValueError(f"bias must have weight's dtype {weight.dtype}, got {bias.dtype}")
