"""The short causal convolution of Gated DeltaNet, its SiLU and the length of a head's columns, in
one op.

    z_t = bias + sum_j weight_j x_(t - taps + 1 + j),  s = silu(z),  y = s or s / |s|, by head

Everything is fp32; y is rounded once. Saved for the backward pass: the inputs. The gradients of the
taps are shares of every program, added in a fixed order.
"""

from __future__ import annotations

import torch

from . import layer_reference as reference
from ._backends import Backend, launchers, uses_triton, without_autocast
from ._registration import Derivative, Op, empty_grad, second_order

Tensor = torch.Tensor

OPERANDS = "Tensor x, Tensor weight, Tensor? bias, Tensor? place"


def _forward_triton(x, weight, bias, place, heads):
    return launchers().launch_short_convolution(x, weight, bias, place, heads)


def _forward_fake(x, weight, bias, place, heads):
    return x.new_empty(x.shape)


def _backward_triton(dy, x, weight, bias, place, heads):
    return launchers().launch_short_convolution_backward(dy, x, weight, bias, place, heads)


def _backward_reference(dy, x, weight, bias, place, heads):
    grads = reference.short_convolution_backward(dy, x, weight, bias, place, heads)
    return grads if bias is not None else (*grads, empty_grad(weight))


def _backward_fake(dy, x, weight, bias, place, heads):
    dbias = empty_grad(weight) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


_forward = Op(
    f"short_convolution({OPERANDS}, int heads) -> Tensor",
    triton=_forward_triton,
    reference=reference.short_convolution,
    fake=_forward_fake,
)
_backward = Op(
    f"short_convolution_backward(Tensor dy, {OPERANDS}, int heads)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _ShortConvolution(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, bias, place, heads):
        ctx.save_for_backward(x, weight, bias, place)
        ctx.heads = heads
        return run(x, weight, bias, place, heads)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, place = ctx.saved_tensors
        dx, dweight, dbias = _backward(dy, x, weight, bias, place, ctx.heads)
        return None, dx, dweight, None if bias is None else dbias, None, None


@_backward.derivative
class _ShortConvolutionBackward(Derivative):
    @staticmethod
    def forward(ctx, run, dy, x, weight, bias, place, heads):
        ctx.save_for_backward(dy, x, weight, bias, place)
        ctx.heads = heads
        return run(dy, x, weight, bias, place, heads)

    @staticmethod
    def backward(ctx, *cotangents):
        *inputs, place = ctx.saved_tensors

        def backward(dy, x, weight, bias):
            tensors = (dy, x, weight, bias, place)
            return reference.short_convolution_backward(*tensors, ctx.heads)

        cotangents = cotangents[:2] if inputs[3] is None else cotangents
        return None, *second_order(backward, inputs, cotangents), None, None


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    place: Tensor | None = None,
    heads: int = 0,
    history: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """silu(conv(x)), causal, every channel by itself.

    Args:
        x: ``[B, T, channels]``.
        weight: ``[channels, taps]``, the last tap for the token itself.
        bias: ``[channels]``, or None.
        place: ``[T]``, where in its sequence a token stands: what stands before the first is zero.
        heads: into so many heads the channels fall whose columns get length 1; 0 leaves them.
        history: ``[B, taps - 1, channels]``, what came before x; zeros where left out. With it
            plain torch computes.
        backend: as everywhere.
    """
    if history is None and uses_triton(x, backend):
        return _forward(x, weight, bias, place, heads)
    with without_autocast(x.device):
        return reference.short_convolution(x, weight, bias, place, heads, history)
