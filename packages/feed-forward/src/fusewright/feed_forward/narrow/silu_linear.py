r"""A linear layer of few input columns with SiLU behind it, along the last axis.

    u = x W^T        h = SiLU(u)        SiLU(x) = x * sigmoid(x)

The backward pass, with s = sigmoid(u):

    du = dh * s * (1 + u * (1 - s))        dx = du W        dW = du^T x        summed over all rows

Saved for it: x and W; u is recomputed, for which no more than x's few columns are read.
Everything is computed in fp32 and rounded once, h to a dtype that may be another than that of x and
W: coordinates of which bf16 cannot hold the differences become a hidden layer in bf16 in one pass
over memory.

Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, arXiv 1702.03118.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import FLOATING, check_device, check_dtype, check_floating
from .._core.precision import without_autocast
from .._core.registration import Derivative, Op, empty_grad
from . import launch, reference

Tensor = torch.Tensor


def _forward_fake(x, weight, dtype):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _backward_reference(dh, x, weight, *wanted):
    # Products are fp32 under autocast, too.
    with without_autocast(x.device):
        grads = reference.silu_linear_backward(dh, x, weight)
    return tuple(
        grad if asked else empty_grad(x) for grad, asked in zip(grads, wanted, strict=True)
    )


def _backward_fake(dh, x, weight, *wanted):
    return tuple(
        each.new_empty(each.shape) if asked else empty_grad(x)
        for each, asked in zip((x, weight), wanted, strict=True)
    )


def _backward_triton(dh, x, weight, *wanted):
    with without_autocast(x.device):
        return launch.silu_linear_backward(dh, x, weight, *wanted)


_forward = Op(
    "silu_linear(Tensor x, Tensor weight, ScalarType dtype) -> Tensor",
    triton=launch.silu_linear,
    reference=reference.silu_linear,
    fake=_forward_fake,
)
_backward = Op(
    "silu_linear_backward(Tensor dh, Tensor x, Tensor weight, bool x_grad, bool weight_grad)"
    " -> (Tensor dx, Tensor dweight)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference()


@_forward.derivative
class _SiLULinear(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, dtype):
        ctx.save_for_backward(x, weight)
        return run(x, weight, dtype)

    @staticmethod
    def backward(ctx, dh):
        wanted = ctx.needs_input_grad[1:3]
        grads = _backward(dh, *ctx.saved_tensors, *wanted)
        return None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True)), None


def silu_linear(
    x: Tensor,
    weight: Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``F.silu(F.linear(x, weight))`` of a narrow x as one op, rounded once.

    Args:
        x: ``[..., d]``, fp32, bf16 or fp16 (the reference takes fp64 too). Meant for d up to 64:
            with more columns, products and SiLU are torch's.
        weight: ``[F, d]``, as ``nn.Linear`` has it, in x's dtype.
        dtype: of the result, one of the same; x's where left out.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., F]``, contiguous, in ``dtype``. Autocast casts nothing: the layer is there for
        inputs that a narrow dtype would not hold. NaN and infinity pass as in torch's functions.

    Differentiable in both, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, or dtype is none of the above.
        ValueError: the shapes do not fit one another, or devices or dtypes differ.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_floating("x", x)
    check_floating("weight", weight)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a number")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must have shape (F, {x.shape[-1]}), one column for each of x, got "
            f"{tuple(weight.shape)}"
        )
    check_device("weight", weight, "x", x)
    check_dtype("weight", weight, "x", x)
    dtype = x.dtype if dtype is None else dtype
    if dtype not in FLOATING:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype}")
    run = _forward if uses_triton(x, backend) else reference.silu_linear
    with without_autocast(x.device):
        return run(x, weight, dtype)
