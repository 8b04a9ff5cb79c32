"""The op of a feed-forward layer, and what it asks of its operands.

    u = x W^T        h = activation(u)        y = h C^T

W has the matrices that x is multiplied by, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._core.checks import check_device, check_dtype, check_floating
from .._core.precision import autocasts
from .._core.registration import Derivative, Op, empty_grad

Tensor = torch.Tensor


class Launches(NamedTuple):
    """``forward``: (y, u, h); ``inference``: (y, None, None); ``backward``: gradients of x, W and
    C, those that are ``wanted``, of (dy, x, W, C, u, h, wanted), u and h None where none of these
    reads it.
    """

    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    inference: Callable[..., tuple[Tensor, None, None]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Reference(NamedTuple):
    """The same in plain torch: y of (x, W, C), all gradients of (dy, x, W, C), and h of u."""

    layer: Callable[[Tensor, Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]
    activation: Callable[[Tensor], Tensor]


def layer_op(
    name: str, weight: str, hidden: tuple[str, str], launches: Launches, reference: Reference
) -> Op:
    """The op ``name`` of x, W, called ``weight``, and C: (y, u, h), the last two called ``hidden``
    and saved for its backward op, ``name``_backward, with x, W and C, where a gradient that is
    asked for reads them.
    """
    u_name, h_name = hidden

    def forward_reference(x, weight, output_weight):
        u = F.linear(x, weight).contiguous()
        return reference.layer(x, weight, output_weight), u, reference.activation(u)

    def forward_fake(x, weight, output_weight):
        leading = x.shape[:-1]
        return tuple(
            x.new_empty((*leading, width))
            for width in (output_weight.shape[0], weight.shape[0], output_weight.shape[1])
        )

    def backward_triton(dy, x, weight, output_weight, u, h, *wanted):
        return launches.backward(dy, x, weight, output_weight, u, h, wanted)

    def backward_reference(dy, x, weight, output_weight, u, h, *wanted):
        grads = reference.backward(dy, x, weight, output_weight)
        return tuple(
            grad if asked else empty_grad(x) for grad, asked in zip(grads, wanted, strict=True)
        )

    def backward_fake(dy, x, weight, output_weight, u, h, *wanted):
        return tuple(
            each.new_empty(each.shape) if asked else empty_grad(x)
            for each, asked in zip((x, weight, output_weight), wanted, strict=True)
        )

    operands = f"Tensor x, Tensor {weight}, Tensor output_weight"
    forward = Op(
        f"{name}({operands}) -> (Tensor y, Tensor {u_name}, Tensor {h_name})",
        triton=launches.forward,
        reference=forward_reference,
        fake=forward_fake,
        inference=launches.inference,
    )
    backward = Op(
        f"{name}_backward(Tensor dy, {operands}, Tensor? {u_name}, Tensor? {h_name},"
        f" bool x_grad, bool {weight}_grad, bool output_weight_grad)"
        f" -> (Tensor dx, Tensor d{weight}, Tensor doutput_weight)",
        triton=backward_triton,
        reference=backward_reference,
        fake=backward_fake,
    )
    backward.derivative_of_reference(u_name, h_name)

    @forward.derivative
    class Gradients(Derivative):
        @staticmethod
        def forward(ctx, run, x, weight, output_weight):
            y, u, h = run(x, weight, output_weight)
            x_grad, weight_grad, output_weight_grad = ctx.needs_input_grad[1:4]
            # Frozen weights need less: h is read by the gradient of C alone, u by the others.
            of_u = u if x_grad or weight_grad else None
            of_h = h if output_weight_grad else None
            ctx.save_for_backward(x, weight, output_weight, of_u, of_h)
            ctx.set_materialize_grads(False)
            return y, *forward.statistics(ctx, run, u, h)

        @staticmethod
        def backward(ctx, dy, *_):
            if dy is None:
                return (None,) * 4
            wanted = ctx.needs_input_grad[1:4]
            grads = backward(dy, *ctx.saved_tensors, *wanted)
            return None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True))

    return forward


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
