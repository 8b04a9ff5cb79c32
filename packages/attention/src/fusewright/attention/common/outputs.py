"""The outputs of the attention ops, from all that computes them."""

from __future__ import annotations

import torch

from .._core.registration import empty_grad

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
# Numbers of o whose rounding is in one word of 32 bits; divides every width.
WORD = 8


def new_outputs(q: Tensor, v: Tensor, with_lse: bool, keep: bool = True) -> Outputs:
    """o, lse, and what the backward pass reads with ``keep``: softmax and o_low. Each is empty
    where it is not asked for, o_low in fp32 too.
    """
    batches, queries, heads, _ = q.shape
    width, rows = v.shape[-1], (batches, heads, queries)
    narrow = q.dtype.itemsize < 4
    return (
        q.new_empty((*q.shape[:-1], width)),
        q.new_empty(rows if with_lse else (0,), dtype=torch.float32),
        q.new_empty((2, *rows) if keep else (0,), dtype=torch.float32),
        q.new_empty((*q.shape[:-1], width // WORD), dtype=torch.int32)
        if keep and narrow
        else q.new_empty(0, dtype=torch.float32),
    )


def outputs_of_launch(q: Tensor, outputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """What a launch returned, empty where it returned None."""
    return tuple([q.new_empty(0, dtype=torch.float32) if x is None else x for x in outputs])


def outputs_of_reference(o: Tensor, lse: Tensor, with_lse: bool, keep: bool = True) -> Outputs:
    """What the reference returned; its backward pass does not read the others."""
    _, empty, softmax, o_low = new_outputs(o, o, False, keep)
    return o, lse.float() if with_lse else empty, softmax.zero_(), o_low.zero_()


def new_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Outputs:
    """dq, dk, dv and dsinks, which is empty without sinks."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, empty_grad(q) if sinks is None else sinks.new_empty(sinks.shape)
