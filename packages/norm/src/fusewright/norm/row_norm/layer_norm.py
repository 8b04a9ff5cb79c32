r"""Layer normalisation, alone and fused with a residual addition.

    layer_norm(x)        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    add_layer_norm(x, r) s = x + r,  y = layer_norm(s)

with the biased variance, over the last axis, N columns; every other axis counts rows. The backward
pass, with x_hat = (x - mean(x)) / sqrt(var(x) + eps) and g = dy * weight:

    dx      = (g - mean(g) - x_hat * mean(g * x_hat)) / sqrt(var(x) + eps)
    dweight = sum over rows of dy * x_hat
    dbias   = sum over rows of dy

Saved for it: x (for add_layer_norm the sum s), weight, and mean(x) and 1 / sqrt(var(x) + eps) in
fp32, one number a row each. The variance is that of the centred row, not a difference of moments;
statistics, products and the sums over rows are fp32; outputs are rounded once.

Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_same, checked_number
from .._core.precision import wide
from .._core.registration import Derivative, Op, empty_grad
from .._core.typed import called_as
from . import launch, launch_backward, reference
from .checks import check_module, check_rows, check_vector, flat_rows

Tensor = torch.Tensor


def _forward_triton(x, weight, bias, eps, dtype):
    y, _, mean, rstd = launch.norm_forward(
        x, None, weight, bias, eps, 0.0, center=True, dtype=dtype
    )
    return y, mean, rstd


def _forward_reference(x, weight, bias, eps, dtype):
    y = reference.layer_norm(x, weight, bias, eps=eps, dtype=dtype)
    mean = reference.mean_of(wide(x))
    rstd = reference.rstd_of(wide(x) - mean, eps)
    return y, mean.squeeze(-1).float(), rstd.squeeze(-1).float()


def _forward_fake(x, weight, bias, eps, dtype):
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), mean, torch.empty_like(mean)


def _add_forward_triton(x, residual, weight, bias, eps, dtype):
    return launch.norm_forward(x, residual, weight, bias, eps, 0.0, center=True, dtype=dtype)


def _add_forward_reference(x, residual, weight, bias, eps, dtype):
    _, total = reference.add_layer_norm(x, residual, None, None, eps=eps)
    y, mean, rstd = _forward_reference(total, weight, bias, eps, dtype)
    return y, total, mean, rstd


def _add_forward_fake(x, residual, weight, bias, eps, dtype):
    y, mean, rstd = _forward_fake(x, weight, bias, eps, dtype)
    return y, x.new_empty(x.shape), mean, rstd


def _backward_triton(dy, dsum, x, weight, bias, mean, rstd, eps, weight_grad, bias_grad):
    dx, _, dweight, dbias, _ = launch_backward.norm_backward(
        dy, dsum, x, weight, bias, mean, rstd, 0.0, weight_grad, bias_grad
    )
    return dx, *(empty_grad(x) if grad is None else grad for grad in (dweight, dbias))


def _backward_reference(dy, dsum, x, weight, bias, mean, rstd, eps, weight_grad, bias_grad):
    dx, dweight, dbias = reference.layer_norm_backward(dy, dsum, x, weight, bias, eps=eps)
    return dx, dweight if weight_grad else empty_grad(x), dbias if bias_grad else empty_grad(x)


def _backward_fake(dy, dsum, x, weight, bias, mean, rstd, eps, weight_grad, bias_grad):
    dweight = weight.new_empty(weight.shape) if weight_grad else empty_grad(x)
    dbias = bias.new_empty(bias.shape) if bias_grad else empty_grad(x)
    return x.new_empty(x.shape), dweight, dbias


_forward = Op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
)
_add_forward = Op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps,"
    " ScalarType dtype) -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)",
    triton=_add_forward_triton,
    reference=_add_forward_reference,
    fake=_add_forward_fake,
)
_backward = Op(
    "layer_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor? bias,"
    " Tensor mean, Tensor rstd, float eps, bool weight_grad, bool bias_grad)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("mean", "rstd")


@_forward.derivative
class _LayerNorm(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, bias, eps, dtype):
        y, mean, rstd = run(x, weight, bias, eps, dtype)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, *_forward.statistics(ctx, run, mean, rstd)

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return None, None, None, None, None, None
        x, weight, bias, mean, rstd = ctx.saved_tensors
        weight_grad = weight is not None and ctx.needs_input_grad[2]
        bias_grad = bias is not None and ctx.needs_input_grad[3]
        dx, dweight, dbias = _backward(
            dy, None, x, weight, bias, mean, rstd, ctx.eps, weight_grad, bias_grad
        )
        return None, dx, dweight if weight_grad else None, dbias if bias_grad else None, None, None


@_add_forward.derivative
class _AddLayerNorm(Derivative):
    @staticmethod
    def forward(ctx, run, x, residual, weight, bias, eps, dtype):
        y, total, mean, rstd = run(x, residual, weight, bias, eps, dtype)
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, total, *_add_forward.statistics(ctx, run, mean, rstd)

    @staticmethod
    def backward(ctx, dy, dsum, *_):
        if dy is None:
            return None, dsum, dsum, None, None, None, None
        total, weight, bias, mean, rstd = ctx.saved_tensors
        weight_grad = weight is not None and ctx.needs_input_grad[3]
        bias_grad = bias is not None and ctx.needs_input_grad[4]
        dx, dweight, dbias = _backward(
            dy, dsum, total, weight, bias, mean, rstd, ctx.eps, weight_grad, bias_grad
        )
        of_vectors = dweight if weight_grad else None, dbias if bias_grad else None
        return None, dx, dx, *of_vectors, None, None


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> Tensor:
    """Centre each row of ``x``, divide it by its standard deviation, scale and shift its columns.

    Args:
        x: ``[..., N]``, rows along the last axis, in fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; the kernels copy only a tensor whose last axis is not contiguous, or
            whose leading axes need three strides.
        weight, bias: ``[N]`` each, of any of these dtypes: fp32 beside a bf16 x is fine. None
            scales by 1 and adds 0. The statistics' precision is x's: fp64 vectors are read as fp32
            beside a lower x.
        eps: added to the variance.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., N]``, contiguous, in x's dtype; in fp32 under CUDA autocast, as torch's own
        layer_norm. A row that holds NaN or infinity, or whose sum passes fp32's range, is NaN; a
        row whose squares alone pass it is 0 plus bias.

    Differentiable in x, weight and bias, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, or eps is no number.
        ValueError: x has no axis, weight's or bias's shape is not ``[N]``, the devices differ, or
            eps is negative or not finite.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_rows(x)
    check_vector("weight", weight, x)
    check_vector("bias", bias, x)
    eps, dtype = checked_number("eps", eps, lowest=0.0), dtype_of_result(x)
    if not uses_triton(x, backend):
        return reference.layer_norm(x, weight, bias, eps=eps, dtype=dtype)
    return _forward(x, weight, bias, eps, dtype)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, in one pass over both.

    Args:
        x, residual: ``[..., N]``, of one shape and dtype.
        weight, bias, eps, backend: as in :func:`layer_norm`.

    Returns:
        The pair ``(y, sum)``, both contiguous; ``sum = x + residual``, rounded to x's dtype, is the
        next residual, and y is exactly the layer_norm of that rounded sum, in its dtype.

    Differentiable in x, residual, weight and bias, twice.

    Raises:
        TypeError: as :func:`layer_norm`.
        ValueError: as :func:`layer_norm`, and where residual differs from x in shape, dtype or
            device.
        RuntimeError: as :func:`layer_norm`.
    """
    check_rows(x)
    check_vector("weight", weight, x)
    check_vector("bias", bias, x)
    check_same("residual", residual, "x", x)
    eps, dtype = checked_number("eps", eps, lowest=0.0), dtype_of_result(x)
    if not uses_triton(x, backend):
        return reference.add_layer_norm(x, residual, weight, bias, eps=eps, dtype=dtype)
    y, total, _, _ = _add_forward(x, residual, weight, bias, eps, dtype)
    return y, total


def dtype_of_result(x: Tensor) -> torch.dtype:
    """x's own; fp32 under CUDA autocast, as of torch's layer_norm."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
        return torch.float32
    return x.dtype


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on the kernels: same arguments, same state dict.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch. Several axes
            are normalised as one.
        backend: "auto", "triton" or "reference".
    """

    backend: Backend

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        check_module(normalized_shape, backend)
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias=bias, device=device, dtype=dtype
        )
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[..., *normalized_shape]``; returns the same shape."""
        rows, *vectors = flat_rows(x, self.normalized_shape, self.weight, self.bias)
        return layer_norm(rows, *vectors, eps=self.eps, backend=self.backend).view(x.shape)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        return f"{super().extra_repr()}, backend={self.backend!r}"
