"""The derivative of the attention ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._core.registration import Derivative, Op


def give_derivative(
    op: Op, backward_op: Op, in_single_tile: Callable[[torch.Tensor], bool] | None = None
) -> None:
    """Give an op its derivative. Both take q, k, v and more operands, the first ``with_lse`` last.

    Where the keys k are in a single tile, the backward pass reads no output of the forward pass.
    """
    operands = op.operands

    @op.derivative
    class AttentionDerivative(Derivative):
        @staticmethod
        def forward(ctx, run, *args):
            o, lse, softmax, o_low = run(*args)
            saved = o, o_low, softmax
            if in_single_tile is not None and in_single_tile(args[1]):
                saved = None, None, None
            ctx.save_for_backward(*args[:operands], *saved)
            *ctx.options, with_lse = args[operands:]
            ctx.set_materialize_grads(False)
            if with_lse:
                return o, lse, *op.statistics(ctx, run, softmax, o_low)
            return o, *op.statistics(ctx, run, lse, softmax, o_low)

        @staticmethod
        def backward(ctx, do, dlse, *_):
            # For what stands behind v, with_lse included.
            others = (None,) * (operands - 3 + len(ctx.options) + 1)
            if do is None and dlse is None:
                return None, None, None, None, *others
            if do is None:
                do = torch.zeros_like(ctx.saved_tensors[0])
            grads = backward_op(do, dlse, *ctx.saved_tensors, *ctx.options)
            return None, *grads, *others
