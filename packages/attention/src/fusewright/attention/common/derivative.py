"""The derivative of the attention ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._core.registration import Derivative, Op


def give_derivative(
    op: Op,
    backward_op: Op,
    in_single_tile: Callable[[torch.Tensor, torch.Tensor], bool] | None = None,
) -> None:
    """Give an op its derivative. Both take q, k, v and more operands, of which the last, sinks, has
    a gradient, and the first takes ``with_lse`` last.

    Where keys k and values v are in a single tile, the backward pass reads no output of the forward
    pass.
    """
    operands = op.operands

    @op.derivative
    class AttentionDerivative(Derivative):
        @staticmethod
        def forward(ctx, run, *args):
            o, lse, softmax, o_low = run(*args)
            saved = o, o_low, softmax
            if in_single_tile is not None and in_single_tile(args[1], args[2]):
                saved = None, None, None
            ctx.save_for_backward(*args[:operands], *saved)
            *ctx.options, with_lse = args[operands:]
            ctx.set_materialize_grads(False)
            if with_lse:
                return o, lse, *op.statistics(ctx, run, softmax, o_low)
            return o, *op.statistics(ctx, run, lse, softmax, o_low)

        @staticmethod
        def backward(ctx, do, dlse, *_):
            # For what stands between v and sinks; for what stands behind, with_lse included.
            between, behind = (None,) * (operands - 4), (None,) * (len(ctx.options) + 1)
            if do is None and dlse is None:
                return (None,) * (1 + operands + len(behind))
            # Under checkpointing they may be unpacked once.
            saved = ctx.saved_tensors
            if do is None:
                do = saved[0].new_zeros(*saved[0].shape[:-1], saved[2].shape[-1])
            *grads, dsinks = backward_op(do, dlse, *saved, *ctx.options)
            if saved[operands - 1] is None:
                dsinks = None
            return None, *grads, *between, dsinks, *behind
