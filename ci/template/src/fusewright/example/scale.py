"""Scaling of a tensor by a number.

    scale(x, factor)    y = factor * x

Elementwise over a tensor of any shape. The backward pass is the same op, dx = factor * dy, so
nothing but the factor is saved. The product is fp32, rounded once to x's dtype.
"""

from __future__ import annotations

import math

import torch

from . import reference
from ._backends import Backend, launchers, uses_triton
from ._registration import Derivative, Op

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _scale_triton(x, factor):
    return launchers().launch_scale(x, factor)


def _scale_fake(x, factor):
    return x.new_empty(x.shape)


_scale = Op(
    "scale(Tensor x, float factor) -> Tensor",
    triton=_scale_triton,
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
        TypeError: x is not a floating tensor.
        ValueError: factor is not finite.
        RuntimeError: backend is "triton" and the kernel cannot serve this call.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATING:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating tensor, got {got}")
    if not math.isfinite(factor):
        raise ValueError(f"factor must be finite, got {factor}")
    if not uses_triton(x, backend):
        return reference.scale(x, factor).contiguous()
    return _scale(x, float(factor))
