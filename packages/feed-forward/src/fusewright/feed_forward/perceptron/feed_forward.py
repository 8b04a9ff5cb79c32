r"""A feed-forward layer of two matrices with SiLU between them, along the last axis.

    u = x A^T        h = SiLU(u)        y = h C^T        SiLU(x) = x * sigmoid(x)

The backward pass, with s = sigmoid(u):

    dh = dy C        du = dh * s * (1 + u * (1 - s))
    dx = du A        dA = du^T x        dC = dy^T h        summed over all rows

Saved for it: x, the weights, u and h. What is between the products is computed in fp32 and rounded
once; u, h, dh and du are in the inputs' dtype. The products are torch's, du takes the memory of dh
and, without gradients, h that of u; but on Hopper, where rows are many, SiLU and its derivative are
epilogues of products of our own (launch_hopper.py), which neither round nor write dh, nor, without
gradients, write u.

Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, arXiv 1702.03118.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_dtype, check_floating
from .._core.precision import autocasts, run_cast
from .._core.registration import Derivative, Op, empty_grad
from . import launch, reference

Tensor = torch.Tensor


def _forward_reference(x, hidden_weight, output_weight):
    u = torch.nn.functional.linear(x, hidden_weight).contiguous()
    return reference.feed_forward(x, hidden_weight, output_weight), u, reference.silu(u)


def _forward_fake(x, hidden_weight, output_weight):
    u = x.new_empty((*x.shape[:-1], hidden_weight.shape[0]))
    return x.new_empty((*x.shape[:-1], output_weight.shape[0])), u, torch.empty_like(u)


def _backward_triton(dy, x, hidden_weight, output_weight, u, h, *wanted):
    return launch.feed_forward_backward(dy, x, hidden_weight, output_weight, u, h, wanted)


def _backward_reference(dy, x, hidden_weight, output_weight, u, h, *wanted):
    grads = reference.feed_forward_backward(dy, x, hidden_weight, output_weight)
    return tuple(
        grad if asked else empty_grad(x) for grad, asked in zip(grads, wanted, strict=True)
    )


def _backward_fake(dy, x, hidden_weight, output_weight, u, h, *wanted):
    return tuple(
        each.new_empty(each.shape) if asked else empty_grad(x)
        for each, asked in zip((x, hidden_weight, output_weight), wanted, strict=True)
    )


_forward = Op(
    "feed_forward(Tensor x, Tensor hidden_weight, Tensor output_weight)"
    " -> (Tensor y, Tensor u, Tensor h)",
    triton=launch.feed_forward,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=launch.feed_forward_inference,
)
_backward = Op(
    "feed_forward_backward(Tensor dy, Tensor x, Tensor hidden_weight, Tensor output_weight,"
    " Tensor u, Tensor h, bool x_grad, bool hidden_weight_grad, bool output_weight_grad)"
    " -> (Tensor dx, Tensor dhidden_weight, Tensor doutput_weight)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("u", "h")


@_forward.derivative
class _FeedForward(Derivative):
    @staticmethod
    def forward(ctx, run, x, hidden_weight, output_weight):
        y, u, h = run(x, hidden_weight, output_weight)
        ctx.save_for_backward(x, hidden_weight, output_weight, u, h)
        ctx.set_materialize_grads(False)
        return y, *_forward.statistics(ctx, run, u, h)

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 4
        wanted = ctx.needs_input_grad[1:4]
        grads = _backward(dy, *ctx.saved_tensors, *wanted)
        return None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True))


def feed_forward(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``F.linear(F.silu(F.linear(x, hidden_weight)), output_weight)`` as one op.

    Args:
        x: ``[..., d]``, fp32, bf16 or fp16 (the reference takes fp64 too).
        hidden_weight: ``[F, d]``, A, as ``nn.Linear`` has it.
        output_weight: ``[M, F]``, C.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Rows of bf16 or fp16 weights that do not start at multiples of 16 bytes cost torch's products a
    multiple of their time: :class:`FeedForward` stores any width F so that they do.

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
    check_operands(x, hidden_weight, output_weight, "hidden_weight", 1)
    run = _kernels if uses_triton(x, backend) else reference.feed_forward
    return run_cast(run, x, hidden_weight, output_weight)


def _kernels(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    return _forward(x, hidden_weight, output_weight)[0]


def check_operands(
    x: Tensor, weight: Tensor, output_weight: Tensor, name: str, products: int
) -> None:
    """Raise where x, the weight of its ``products``, which has a ``name``, or that of the output is
    none, or they do not fit one another.
    """
    check_floating("x", x)
    check_floating(name, weight)
    check_floating("output_weight", output_weight)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a number")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] % products:
        rows = "F" if products == 1 else f"{products} F"
        raise ValueError(
            f"{name} must have shape ({rows}, {x.shape[-1]}), one column for each of x, "
            f"got {tuple(weight.shape)}"
        )
    hidden = weight.shape[0] // products
    if output_weight.ndim != 2 or output_weight.shape[1] != hidden:
        raise ValueError(
            f"output_weight must have shape (M, {hidden}), one column for each of the hidden "
            f"layer, got {tuple(output_weight.shape)}"
        )
    for each, tensor in ((name, weight), ("output_weight", output_weight)):
        # Calls less for each operand of a small layer.
        if tensor.device != x.device:
            check_device(each, tensor, "x", x)
        if tensor.dtype != x.dtype and not autocasts(x.device.type):
            check_dtype(each, tensor, "x", x)
