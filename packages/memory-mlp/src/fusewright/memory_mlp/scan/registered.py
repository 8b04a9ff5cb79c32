"""What the ops of all scans have in common: operands, fakes and derivatives.

Operands are q, k, v and the packed state, the three gates, which tokens are written, the packed
rest and which chunks begin with the state again, each of the last three or None; options follow.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.registration import Derivative, Op

Tensor = torch.Tensor

ROWS = "Tensor q, Tensor k, Tensor v, Tensor state"
GATES = "Tensor alpha, Tensor eta, Tensor theta, Tensor? written, Tensor? rest, Tensor? resets"
GRADIENTS = (
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dstate, Tensor dalpha, Tensor deta, Tensor dtheta,"
    " Tensor drest)"
)
# The longest chunk that one program holds.
LONGEST_CHUNK = 64


def outputs_fake(q: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """y, the state after the last token, those with which the chunks began, the inner loss."""
    chunks = -(-q.shape[1] // chunk)
    states = state.new_empty((chunks, *state.shape))
    loss = state.new_empty(q.shape[:3])
    return q.new_empty(q.shape), state.new_empty(state.shape), states, loss


def backward_fake(dy, dend, q, k, v, state, states, alpha, eta, theta, written, rest, *options):
    grads = tuple(x.new_empty(x.shape) for x in (q, k, v, state, alpha, eta, theta))
    return *grads, state.new_empty(0) if rest is None else rest.new_empty(rest.shape)


def derive_scan(forward: Op, backward: Op) -> None:
    """Give the scan ``forward`` its derivative, and ``backward``, which computes it, its own."""

    @forward.derivative
    class Scan(Derivative):
        @staticmethod
        def forward(ctx, run, q, k, v, state, alpha, eta, theta, written, rest, resets, *options):
            gates = alpha, eta, theta, written, rest, resets
            y, end, states, loss = run(q, k, v, state, *gates, *options)
            ctx.save_for_backward(q, k, v, state, states, *gates)
            ctx.options = options
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(loss)
            (states,) = forward.statistics(ctx, run, states)
            return y, end, states, loss

        @staticmethod
        def backward(ctx, dy, dend, *_):
            return operand_gradients(ctx, backward, dy, dend)

    # The states follow from the inputs, through which their gradients pass.
    backward.derivative_of_reference("states")


def operand_gradients(
    ctx: Any, backward: Op, dy: Tensor | None, dend: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What the derivative of a scan returns for its arguments: the function that computes it, the
    operands, the options. Saved are q, k, v and the state first, rest and resets last.
    """
    saved = q, _, _, state, *_, rest, _ = ctx.saved_tensors
    if dy is None and dend is None:
        grads, drest = [None] * 7, None
    else:
        dy = torch.zeros_like(q) if dy is None else dy
        dend = torch.zeros_like(state) if dend is None else dend
        *grads, drest = backward(dy, dend, *saved, *ctx.options)
    drest = None if rest is None else drest
    return None, *grads, None, drest, None, *(None for _ in ctx.options)
