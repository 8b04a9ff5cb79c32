r"""A linear layer whose rows are in groups, each with a weight of its own.

    y_r = W_g x_r                                 for the rows r of group g
    dx_r = W_g^T dy_r,  dW_g = sum over the group's rows of dy_r x_r^T

Group g has the rows from ends[g - 1], or 0, up to ends[g], counted over all leading axes. Sums are
fp32, in the order of the columns or rows, and rounded once. Saved: x, W and ends.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_dtype, check_floating, check_integers
from .._core.precision import autocasts, run_cast
from .._core.registration import Derivative, Op, empty_grad
from . import launch, reference

Tensor = torch.Tensor


def _forward_fake(x, weight, ends):
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def _backward_reference(dy, x, weight, ends, *wanted):
    grads = reference.grouped_linear_backward(dy, x, weight, ends)
    return tuple(
        grad.contiguous() if asked else empty_grad(x)
        for grad, asked in zip(grads, wanted, strict=True)
    )


def _backward_fake(dy, x, weight, ends, *wanted):
    return tuple(
        each.new_empty(each.shape) if asked else empty_grad(x)
        for each, asked in zip((x, weight), wanted, strict=True)
    )


_forward = Op(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    triton=launch.grouped_linear,
    reference=reference.grouped_linear,
    fake=_forward_fake,
)
_backward = Op(
    "grouped_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor ends, bool x_grad,"
    " bool weight_grad) -> (Tensor dx, Tensor dweight)",
    triton=launch.grouped_linear_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference()


@_forward.derivative
class _GroupedLinear(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, ends):
        ctx.save_for_backward(x, weight, ends)
        return run(x, weight, ends)

    @staticmethod
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[1:3]
        grads = _backward(dy, *ctx.saved_tensors, *wanted)
        return None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True)), None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Each row of x times the weight of its group.

    Args:
        x: ``[..., d]``, in fp32, bf16 or fp16 (the reference takes fp64 too); its rows, counted
            over all leading axes, lie group after group.
        weight: ``[G, S, d]``, in x's dtype, each as ``nn.Linear`` has it.
        ends: ``[G]``, int32 or int64, the row behind the last of each group; a group that would end
            before it begins has no rows. It is read on the GPU alone.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., S]``, contiguous, in x's dtype, or autocast's; zeros in rows behind the last group.

    Differentiable in x and weight, twice; the second derivative runs in plain torch. The reference
    multiplies every row by every weight.

    Raises:
        TypeError: x or weight is not floating point or not strided, or ends is none of integers.
        ValueError: the shapes do not fit one another, or devices or, outside autocast, dtypes
            differ.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_groups(x, weight, ends)
    product = _forward if uses_triton(x, backend) else reference.grouped_linear
    return run_cast(lambda x, weight: product(x, weight, ends), x, weight)


def check_groups(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    """Raise where the operands are none, or do not fit one another."""
    check_floating("x", x)
    check_floating("weight", weight)
    check_integers("ends", ends)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a number")
    if weight.ndim != 3 or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"weight must have shape (G, S, {x.shape[-1]}), one column for each of x, "
            f"got {tuple(weight.shape)}"
        )
    if tuple(ends.shape) != (len(weight),):
        raise ValueError(
            f"ends must have shape ({len(weight)},), one for each weight, got {tuple(ends.shape)}"
        )
    for name, tensor in (("weight", weight), ("ends", ends)):
        check_device(name, tensor, "x", x)
    if not autocasts(x.device.type):
        check_dtype("weight", weight, "x", x)
