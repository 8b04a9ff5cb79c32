r"""A feed-forward layer gated by SiLU, along the last axis.

    gate, up = x A^T, x B^T        h = SiLU(gate) * up        y = h C^T

and, with s = sigmoid(gate), the backward pass:

    dh = dy C        dgate = dh * up * s * (1 + gate * (1 - s))        dup = dh * gate * s
    dx = dgate A + dup B        dA = dgate^T x        dB = dup^T x        dC = dy^T h

sums of the weights' gradients over all rows. A lies above B in one matrix, so x A^T and x B^T are
the halves of one product, and so are their gradients. Saved for the backward pass: x, the weights,
that product and h. What is between the products is computed in fp32 and rounded once; the halves,
h and their gradients are in the inputs' dtype. The products are torch's.

Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.precision import run_cast
from .._core.registration import Derivative, Op, empty_grad
from ..gating import reference as gating
from ..perceptron.feed_forward import check_operands
from . import launch, reference

Tensor = torch.Tensor


def _forward_reference(x, joint_weight, output_weight):
    joint = torch.nn.functional.linear(x, joint_weight).contiguous()
    y = reference.swiglu(x, joint_weight, output_weight)
    return y, joint, gating.silu_mul_halves(joint)


def _forward_fake(x, joint_weight, output_weight):
    joint = x.new_empty((*x.shape[:-1], joint_weight.shape[0]))
    y = x.new_empty((*x.shape[:-1], output_weight.shape[0]))
    return y, joint, x.new_empty((*x.shape[:-1], output_weight.shape[1]))


def _backward_triton(dy, x, joint_weight, output_weight, joint, gated, *wanted):
    return launch.gated_feed_forward_backward(
        dy, x, joint_weight, output_weight, joint, gated, wanted
    )


def _backward_reference(dy, x, joint_weight, output_weight, joint, gated, *wanted):
    grads = reference.swiglu_backward(dy, x, joint_weight, output_weight)
    return tuple(
        grad if asked else empty_grad(x) for grad, asked in zip(grads, wanted, strict=True)
    )


def _backward_fake(dy, x, joint_weight, output_weight, joint, gated, *wanted):
    return tuple(
        each.new_empty(each.shape) if asked else empty_grad(x)
        for each, asked in zip((x, joint_weight, output_weight), wanted, strict=True)
    )


_forward = Op(
    "gated_feed_forward(Tensor x, Tensor joint_weight, Tensor output_weight)"
    " -> (Tensor y, Tensor joint, Tensor gated)",
    triton=launch.gated_feed_forward,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=launch.gated_feed_forward_inference,
)
_backward = Op(
    "gated_feed_forward_backward(Tensor dy, Tensor x, Tensor joint_weight, Tensor output_weight,"
    " Tensor joint, Tensor gated, bool x_grad, bool joint_weight_grad, bool output_weight_grad)"
    " -> (Tensor dx, Tensor djoint_weight, Tensor doutput_weight)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("joint", "gated")


@_forward.derivative
class _GatedFeedForward(Derivative):
    @staticmethod
    def forward(ctx, run, x, joint_weight, output_weight):
        y, joint, gated = run(x, joint_weight, output_weight)
        ctx.save_for_backward(x, joint_weight, output_weight, joint, gated)
        ctx.set_materialize_grads(False)
        return y, *_forward.statistics(ctx, run, joint, gated)

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 4
        wanted = ctx.needs_input_grad[1:4]
        grads = _backward(dy, *ctx.saved_tensors, *wanted)
        return None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True))


def gated_feed_forward(
    x: Tensor, joint_weight: Tensor, output_weight: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``F.linear(silu_mul(gate, up), output_weight)`` as one op, gate and up the halves of
    ``F.linear(x, joint_weight)``.

    Args:
        x: ``[..., d]``, fp32, bf16 or fp16 (the reference takes fp64 too).
        joint_weight: ``[2 * F, d]``, A above B.
        output_weight: ``[M, F]``, C.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Rows of bf16 or fp16 weights that do not start at multiples of 16 bytes cost torch's products a
    multiple of their time: :class:`SwiGLU` stores any width F so that they do.

    Returns:
        ``[..., M]``, contiguous, in x's dtype; in autocast's under autocast, to which all three are
        cast. NaN and infinity pass as in torch's functions.

    Differentiable in all three, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided.
        ValueError: the shapes do not fit one another, or devices or, outside autocast, dtypes
            differ.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_operands(x, joint_weight, output_weight, "joint_weight", 2)
    run = _kernels if uses_triton(x, backend) else reference.swiglu
    return run_cast(run, x, joint_weight, output_weight)


def _kernels(x: Tensor, joint_weight: Tensor, output_weight: Tensor) -> Tensor:
    return _forward(x, joint_weight, output_weight)[0]
