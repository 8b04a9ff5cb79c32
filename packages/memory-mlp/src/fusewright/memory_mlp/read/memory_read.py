r"""Reading the memory without writing it: a two-layer perceptron for every row and head.

    y = w2 act(w1 q + b1) + b2

One launch forward and one backward, a second where few heads have many tokens. Saved are q and the
weights; the hidden layer is recomputed. Weights that are views of what a scan returned are read
in place, and their gradient is written packed. Operands of products are in q's dtype
(fp32: exact, unless torch multiplies fp32 matrices in TF32), sums and biases in fp32. Sums have a
fixed order.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.backends import Backend, decline, uses_triton
from .._core.checks import FLOATING, check_device, check_floating, check_option
from .._core.precision import autocast, wide, without_autocast
from .._core.registration import Derivative, Op, empty_grad
from ..common import reference as common_reference
from ..common.checks import ACTIVATION_NAMES, are_plain, check_heads, check_switch
from ..common.operands import WIDEST, WIDEST_HIDDEN
from ..common.weights import (
    MemoryWeights,
    Weights,
    cast,
    pack_weights,
    unpack_weights,
    weight_shapes,
)
from . import launch, reference

Tensor = torch.Tensor

OPERANDS = "Tensor q, Tensor state, int hidden, str activation"


def _forward_reference(q, state, hidden, activation):
    weights = unpack_weights(state.to(q.dtype), hidden, q.shape[-1])
    with without_autocast(q.device):
        return reference.memory_read(q, weights, activation).contiguous()


def _forward_fake(q, state, hidden, activation):
    return q.new_empty(q.shape)


def _backward_triton(dy, q, *others):
    grads = launch.read_backward(dy, q, *others)
    return tuple(empty_grad(q) if x is None else x for x in grads)


def _backward_reference(dy, q, state, hidden, activation, with_q, with_weights):
    def read(q, state):
        return _forward_reference(q, state, hidden, activation)

    dq, dstate = torch.func.vjp(read, q, state)[1](dy)
    return dq.contiguous() if with_q else empty_grad(q), dstate if with_weights else empty_grad(q)


def _backward_fake(dy, q, state, hidden, activation, with_q, with_weights):
    return (
        q.new_empty(q.shape) if with_q else empty_grad(q),
        state.new_empty(state.shape) if with_weights else empty_grad(q),
    )


_forward = Op(
    f"memory_read({OPERANDS}) -> Tensor",
    triton=launch.read_forward,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    f"memory_read_backward(Tensor dy, {OPERANDS}, bool with_q, bool with_weights)"
    " -> (Tensor dq, Tensor dstate)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _MemoryRead(Derivative):
    @staticmethod
    def forward(ctx, run, q, state, *options):
        ctx.save_for_backward(q, state)
        ctx.options = options
        return run(q, state, *options)

    @staticmethod
    def backward(ctx, dy):
        needed = ctx.needs_input_grad[1:3]
        grads = _backward(dy, *ctx.saved_tensors, *ctx.options, *needed)
        wanted = (g if is_needed else None for g, is_needed in zip(grads, needed, strict=True))
        return None, *wanted, None, None


_backward.derivative_of_reference()


def memory_read(
    q: Tensor,
    weights: MemoryWeights,
    *,
    activation: str = "silu",
    residual_norm: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """M(q) = w2 act(w1 q + b1) + b2.

    Args:
        q: ``[B, T, heads, D]``, fp32, bf16 or fp16 (the reference takes fp64 too). Any strides;
            only a tensor whose last axis is not contiguous is copied.
        weights: ``[B, heads, ...]`` of any floating dtype; may be expanded. Views of what a scan
            returned are read in place, others are packed first.
        activation: "silu", "relu" or "gelu" (the exact one).
        residual_norm: whether M(q) is q plus the layer norm of that over its features, without
            gain, in plain torch.
        backend: "auto" takes the kernels for CUDA tensors and the reference, products of torch, for
            CPU tensors; "triton" raises where the kernels cannot serve.

    Returns:
        ``[B, T, heads, D]`` in q's dtype, or in autocast's under autocast; contiguous from the
        kernels. Matrices and the first layer's result are rounded to that dtype, as in torch's own
        linear layers (the reference rounds biases and what is added to them too); products are
        summed in fp32. Numbers that are not finite stay within their row and head.

    Differentiable in q and weights: any number of times in the reference, twice in the kernels,
    whose second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, or residual_norm not bool.
        ValueError: the shapes do not fit together, the devices differ, or an option is unknown.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_read(q, weights, activation)
    check_switch("residual_norm", residual_norm)
    (q,) = autocast(q)
    hidden = weights.b1.shape[-1]
    if uses_triton(q, backend) and serves(q, hidden, backend):
        y = _forward(q, pack_weights(weights).to(torch.float32), hidden, activation)
    else:
        y = reference.memory_read(q, cast(weights, q.dtype), activation)
    if not residual_norm:
        return y
    return (wide(q) + common_reference.normalised(wide(y))[0]).to(q.dtype)


def deep_memory_read(
    q: Tensor, weights: Weights, *, activation: str, residual_norm: bool = False
) -> Tensor:
    """:func:`memory_read` of a memory of any number of layers, (w1, b1, .., wn, bn), in plain
    torch, in fp32 (fp64 for fp64 queries); nothing is checked.
    """
    with without_autocast(q.device):
        form: dict[str, Any] = {"activation": activation, "residual_norm": residual_norm}
        y = common_reference.memory_read(q.transpose(1, 2), weights, **form)
        return y.transpose(1, 2)


def check_read(q: Tensor, weights: MemoryWeights, activation: str) -> None:
    """q must hold rows that the memories of its rows and heads can read."""
    if (
        isinstance(q, Tensor)
        and isinstance(weights, MemoryWeights)
        and isinstance(weights.b1, Tensor)
        and q.ndim == 4
        and q.shape[-1]
        and weights.b1.ndim
        and activation in ACTIVATION_NAMES
    ):
        batch, _, heads, width = q.shape
        shapes = weight_shapes((batch, heads), weights.b1.shape[-1], width)
        if are_plain((q, *weights), (q.shape, *shapes), (FLOATING,) * 5, q.device):
            return
    # One is wrong: which one?
    check_heads("q", q)
    if not isinstance(weights, MemoryWeights):
        raise TypeError(f"weights must be MemoryWeights, got {type(weights).__name__}")
    check_option("activation", activation, ACTIVATION_NAMES)
    for field, x in zip(weights._fields, weights, strict=True):
        check_floating(f"weights.{field}", x)
    batch, _, heads, width = q.shape
    hidden = weights.b1.shape[-1] if weights.b1.ndim else 0
    shapes = weight_shapes((batch, heads), hidden, width)
    for field, x, shape in zip(weights._fields, weights, shapes, strict=True):
        if tuple(x.shape) != shape:
            raise ValueError(f"weights.{field} must be {shape}, got {tuple(x.shape)}")
        check_device(f"weights.{field}", x, "q", q)


def serves(q: Tensor, hidden: int, backend: Backend) -> bool:
    """Whether the kernels are made for a memory of this size."""
    if fits(q.shape[-1], hidden):
        return True
    obstacle = (
        f"the kernels of memory_read serve heads of up to {WIDEST} columns and 1 to "
        f"{WIDEST_HIDDEN} hidden units, not {q.shape[-1]} and {hidden}"
    )
    decline(obstacle, backend)
    return False


def fits(width: int, hidden: int) -> bool:
    return width <= WIDEST and 0 < hidden <= WIDEST_HIDDEN
