r"""Root-mean-square normalisation, alone and fused with a residual addition.

    rms_norm(x)        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)
    add_rms_norm(x, r) s = x + r,  y = rms_norm(s)

over the last axis, N columns; every other axis counts rows. The backward pass, with x_hat = x /
sqrt(mean(x^2) + eps) and g = dy * (weight + weight_offset):

    dx      = (g - x_hat * mean(g * x_hat)) / sqrt(mean(x^2) + eps)
    dweight = sum over rows of dy * x_hat

Saved for it: x (for add_rms_norm the sum s), weight, and 1 / sqrt(mean(x^2) + eps) in fp32, one
number a row. Statistics, products and the sums over rows are fp32; outputs are rounded once, to x's
dtype.

Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_same, checked_number
from .._core.precision import wide
from .._core.registration import Derivative, Op, empty_grad
from .._core.typed import called_as
from . import launch, launch_backward, reference
from .checks import check_module, check_rows, check_vector, checked_eps, flat_rows

Tensor = torch.Tensor


def _forward_triton(x, weight, eps, weight_offset, statistics=True):
    y, _, _, rstd = launch.norm_forward(
        x, None, weight, None, eps, weight_offset, False, statistics
    )
    return y, rstd


def _forward_reference(x, weight, eps, weight_offset):
    y = reference.rms_norm(x, weight, eps=eps, weight_offset=weight_offset)
    return y, reference.rstd_of(wide(x), eps).squeeze(-1).float()


def _forward_fake(x, weight, eps, weight_offset):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _add_forward_triton(x, residual, weight, eps, weight_offset, statistics=True):
    y, total, _, rstd = launch.norm_forward(
        x, residual, weight, None, eps, weight_offset, center=False, statistics=statistics
    )
    return y, total, rstd


def _add_forward_reference(x, residual, weight, eps, weight_offset):
    _, total = reference.add_rms_norm(x, residual, None, eps=eps)
    y, rstd = _forward_reference(total, weight, eps, weight_offset)
    return y, total, rstd


def _add_forward_fake(x, residual, weight, eps, weight_offset):
    y, rstd = _forward_fake(x, weight, eps, weight_offset)
    return y, x.new_empty(x.shape), rstd


def _backward_triton(dy, dsum, x, weight, rstd, eps, weight_offset, weight_grad):
    dx, _, dweight, *_ = launch_backward.norm_backward(
        dy, dsum, x, weight, None, None, rstd, weight_offset, weight_grad, False
    )
    return dx, empty_grad(x) if dweight is None else dweight


def _backward_reference(dy, dsum, x, weight, rstd, eps, weight_offset, weight_grad):
    dx, dweight = reference.rms_norm_backward(
        dy, dsum, x, weight, eps=eps, weight_offset=weight_offset
    )
    return dx, dweight if weight_grad else empty_grad(x)


def _backward_fake(dy, dsum, x, weight, rstd, eps, weight_offset, weight_grad):
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if weight_grad else empty_grad(x)


_forward = Op(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> (Tensor y, Tensor rstd)",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=functools.partial(_forward_triton, statistics=False),
)
_add_forward = Op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset)"
    " -> (Tensor y, Tensor sum, Tensor rstd)",
    triton=_add_forward_triton,
    reference=_add_forward_reference,
    fake=_add_forward_fake,
    inference=functools.partial(_add_forward_triton, statistics=False),
)
_backward = Op(
    "rms_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, float eps,"
    " float weight_offset, bool weight_grad) -> (Tensor dx, Tensor dweight)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("rstd")


@_forward.derivative
class _RMSNorm(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, eps, weight_offset):
        y, rstd = run(x, weight, eps, weight_offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = eps, weight_offset
        ctx.set_materialize_grads(False)
        return y, *_forward.statistics(ctx, run, rstd)

    @staticmethod
    def backward(ctx, dy, _):
        if dy is None:
            return None, None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        weight_grad = weight is not None and ctx.needs_input_grad[2]
        dx, dweight = _backward(dy, None, x, weight, rstd, *ctx.options, weight_grad)
        return None, dx, dweight if weight_grad else None, None, None


@_add_forward.derivative
class _AddRMSNorm(Derivative):
    @staticmethod
    def forward(ctx, run, x, residual, weight, eps, weight_offset):
        y, total, rstd = run(x, residual, weight, eps, weight_offset)
        ctx.save_for_backward(total, weight, rstd)
        ctx.options = eps, weight_offset
        ctx.set_materialize_grads(False)
        return y, total, *_add_forward.statistics(ctx, run, rstd)

    @staticmethod
    def backward(ctx, dy, dsum, _):
        if dy is None:
            return None, dsum, dsum, None, None, None
        total, weight, rstd = ctx.saved_tensors
        weight_grad = weight is not None and ctx.needs_input_grad[3]
        dx, dweight = _backward(dy, dsum, total, weight, rstd, *ctx.options, weight_grad)
        return None, dx, dx, dweight if weight_grad else None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Divide each row of ``x`` by its root mean square and scale its columns.

    Args:
        x: ``[..., N]``, rows along the last axis, in fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides; the kernels copy only a tensor whose last axis is not contiguous, or
            whose leading axes need three strides.
        weight: ``[N]``, of any of these dtypes: fp32 beside a bf16 x is fine. None scales by 1.
            The statistics' precision is x's: an fp64 weight is read as fp32 beside a lower x.
        eps: added to the mean square; None takes the machine epsilon of the statistics' dtype
            (fp32, or fp64 for an fp64 x), as torch does.
        weight_offset: added to the weight in fp32 (1.0 for weights stored around zero).
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., N]``, contiguous, in x's dtype, under autocast too, as torch's own rms_norm. A row
        that holds NaN is NaN. A row that holds infinity, or squares beyond fp32's range, has mean
        square infinity: its finite elements become 0, the infinite ones NaN.

    Differentiable in x and weight, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, or eps or weight_offset is no
            number.
        ValueError: x has no axis, weight's shape is not ``[N]``, the devices differ, or eps is
            negative, or a number is not finite.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_rows(x)
    check_vector("weight", weight, x)
    eps, weight_offset = checked_eps(eps, x), checked_number("weight_offset", weight_offset)
    if not uses_triton(x, backend):
        return reference.rms_norm(x, weight, eps=eps, weight_offset=weight_offset)
    return _forward(x, weight, eps, weight_offset)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, in one pass over both.

    Args:
        x, residual: ``[..., N]``, of one shape and dtype.
        weight, eps, weight_offset, backend: as in :func:`rms_norm`.

    Returns:
        The pair ``(y, sum)``, both contiguous; ``sum = x + residual``, rounded to x's dtype, is the
        next residual, and y is exactly the rms_norm of that rounded sum.

    Differentiable in x, residual and weight, twice.

    Raises:
        TypeError: as :func:`rms_norm`.
        ValueError: as :func:`rms_norm`, and where residual differs from x in shape, dtype or
            device.
        RuntimeError: as :func:`rms_norm`.
    """
    check_rows(x)
    check_same("residual", residual, "x", x)
    check_vector("weight", weight, x)
    eps, weight_offset = checked_eps(eps, x), checked_number("weight_offset", weight_offset)
    if not uses_triton(x, backend):
        return reference.add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset)
    y, total, _ = _add_forward(x, residual, weight, eps, weight_offset)
    return y, total


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on the kernels: same arguments, same state dict.

    With a ``weight_offset`` the stored weight lacks the offset: a state dict then fits only modules
    of the same offset.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in torch. Several axes are
            normalised as one.
        weight_offset: added to the weight in fp32. With 1.0 the weight starts at 0 instead of 1.
        backend: "auto", "triton" or "reference".
    """

    weight_offset: float
    backend: Backend

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        """Take the arguments that the class names."""
        check_module(normalized_shape, backend)
        weight_offset = checked_number("weight_offset", weight_offset)
        # torch's constructor resets the parameters, which needs the offset.
        self.__dict__.update(weight_offset=weight_offset, backend=backend)
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the weight so that the module scales by 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[..., *normalized_shape]``; returns the same shape."""
        rows, *vectors = flat_rows(x, self.normalized_shape, self.weight)
        y = rms_norm(
            rows, *vectors, eps=self.eps, weight_offset=self.weight_offset, backend=self.backend
        )
        return y.view(x.shape)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        return (
            f"{super().extra_repr()}, weight_offset={self.weight_offset}, backend={self.backend!r}"
        )
