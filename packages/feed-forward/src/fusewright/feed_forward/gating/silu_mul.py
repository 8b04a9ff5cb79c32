r"""SiLU gating, elementwise.

    y = SiLU(gate) * up          SiLU(x) = x * sigmoid(x)

and, with s = sigmoid(gate), the backward pass, both gradients in one launch:

    dgate = dy * up * s * (1 + gate * (1 - s))
    dup   = dy * gate * s

Saved for it: gate and up; y's factor SiLU(gate) is recomputed. Everything is computed in fp32
and rounded once, to the inputs' dtype.

Where gate and up are the halves of one product, ``silu_mul_halves`` writes their gradients into the
halves of one tensor, so that autograd has none to concatenate.

Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_floating, check_same
from .._core.registration import Derivative, Op
from . import launch, reference

Tensor = torch.Tensor


def _forward_fake(gate, up):
    return gate.new_empty(gate.shape)


def _backward_fake(dy, gate, up):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _halves_forward_fake(joint):
    return joint.new_empty((*joint.shape[:-1], joint.shape[-1] // 2))


def _halves_backward_fake(dy, joint):
    return joint.new_empty(joint.shape)


_forward = Op(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    triton=launch.silu_mul,
    reference=reference.silu_mul,
    fake=_forward_fake,
)
_backward = Op(
    "silu_mul_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)",
    triton=launch.silu_mul_backward,
    reference=reference.silu_mul_backward,
    fake=_backward_fake,
)
_backward.derivative_of_reference()
_halves_forward = Op(
    "silu_mul_halves(Tensor joint) -> Tensor",
    triton=launch.silu_mul_halves,
    reference=reference.silu_mul_halves,
    fake=_halves_forward_fake,
)
_halves_backward = Op(
    "silu_mul_halves_backward(Tensor dy, Tensor joint) -> Tensor",
    triton=launch.silu_mul_halves_backward,
    reference=reference.silu_mul_halves_backward,
    fake=_halves_backward_fake,
)
_halves_backward.derivative_of_reference()


@_forward.derivative
class _SiLUMul(Derivative):
    @staticmethod
    def forward(ctx, run, gate, up):
        ctx.save_for_backward(gate, up)
        return run(gate, up)

    @staticmethod
    def backward(ctx, dy):
        return None, *_backward(dy, *ctx.saved_tensors)


@_halves_forward.derivative
class _SiLUMulHalves(Derivative):
    @staticmethod
    def forward(ctx, run, joint):
        ctx.save_for_backward(joint)
        return run(joint)

    @staticmethod
    def backward(ctx, dy):
        return None, _halves_backward(dy, *ctx.saved_tensors)


def silu_mul(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """SiLU(gate) * up, elementwise.

    Args:
        gate, up: ``[..., N]``, of one shape and dtype, fp32, bf16 or fp16 (the reference takes fp64
            too). Any strides: the halves of one tensor are read in place. The kernels copy
            only a tensor whose last axis is not contiguous, or whose leading axes need three
            strides.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., N]``, contiguous, in the inputs' dtype, under autocast too, as elementwise functions
        of torch. A gate of -inf gives NaN, as torch's own SiLU; NaN and other infinities pass as in
        the formula.

    Differentiable in gate and up, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided.
        ValueError: gate and up differ in shape, dtype or device.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_floating("gate", gate)
    check_same("up", up, "gate", gate)
    if not uses_triton(gate, backend):
        return reference.silu_mul(gate, up)
    return _forward(gate, up)


def silu_mul_halves(joint: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu_mul of the first and the second half of the last axis of ``joint [..., 2 * N]``: the
    gate, then up.

    Returns:
        ``[..., N]``, as :func:`silu_mul`, whose numerics, gradients and backends these are.

    Raises:
        TypeError: joint is not floating point or not strided.
        ValueError: joint has no axis, or an odd number of columns.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_floating("joint", joint)
    if joint.dim() == 0 or joint.shape[-1] % 2:
        raise ValueError(
            f"joint must have two halves of one width, [..., 2 * N]; got {list(joint.shape)}"
        )
    if not uses_triton(joint, backend):
        return reference.silu_mul_halves(joint)
    return _halves_forward(joint)
