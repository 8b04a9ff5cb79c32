"""Scaling of a tensor by a number.

    scale(x, factor)    y = factor * x

Elementwise over a tensor of any shape. The backward pass is the same op, dx = factor * dy, so
nothing but the factor is saved. The product is fp32, rounded once to x's dtype.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_floating, checked_number
from .._core.registration import Derivative, Op
from . import launch, reference


def _scale_fake(x, factor):
    return x.new_empty(x.shape)


_scale = Op(
    "scale(Tensor x, float factor) -> Tensor",
    triton=launch.scale,
    reference=reference.scale,
    fake=_scale_fake,
)


@_scale.derivative
class _Scale(Derivative):
    @staticmethod
    def forward(ctx, run, x, factor):
        ctx.factor = factor
        return run(x, factor)

    @staticmethod
    def backward(ctx, dy):
        return None, _scale(dy, ctx.factor), None


def scale(x: torch.Tensor, factor: float, *, backend: Backend = "auto") -> torch.Tensor:
    """Multiply a tensor by a number.

    Args:
        x: any shape, in fp32, bf16 or fp16 (the reference takes fp64 too).
        factor: finite.
        backend: "auto" takes the kernel for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernel cannot serve.

    Returns:
        factor * x, contiguous, in x's shape and dtype. Differentiable in x, twice.

    Raises:
        TypeError: x is not a floating tensor, or factor no number.
        ValueError: factor is not finite.
        RuntimeError: backend is "triton" and the kernel cannot serve this call.
    """
    check_floating("x", x)
    factor = checked_number("factor", factor)
    if not uses_triton(x, backend):
        return reference.scale(x, factor)
    return _scale(x, factor)
