"""The rule by its kernels, one operator of torch with its derivative and the derivative of that."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import reference
from ._backends import launchers
from ._configs import VECTOR
from ._registration import Derivative, Op, empty_grad, second_order

Tensor = torch.Tensor

OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, Tensor? cu_seqlens"
SAVED = "Tensor inverses, Tensor states, Tensor decays"


def _forward_triton(q, k, v, g, beta, state, cu_seqlens, scale):
    return launchers().launch_rule(q, k, v, g, beta, state, cu_seqlens, scale)


def _forward_fake(q, k, v, g, beta, state, cu_seqlens, scale):
    heads, width = v.shape[2:]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    chunks = reference.most_chunks(q, cu_seqlens)
    return (
        q.new_empty(v.shape),
        g.new_empty(sequences, heads, q.shape[3], width),
        q.new_empty(chunks, heads, reference.CHUNK, reference.CHUNK),
        q.new_empty(chunks, heads, q.shape[3], width),
        g.new_empty(chunks, heads, reference.CHUNK),
    )


def _backward_triton(do, dend, *tensors_and_scale):
    return launchers().launch_rule_backward(do, dend, *tensors_and_scale)


def _backward_reference(do, dend, q, k, v, g, beta, state, cu_seqlens, *saved_and_scale):
    tensors = (q, k, v, g, beta, state, cu_seqlens)
    grads = reference.rule_backward(do, dend, *tensors, saved_and_scale[-1])
    return grads if state is not None else (*grads, empty_grad(g))


def _backward_fake(do, dend, q, k, v, g, beta, state, *others):
    dstate = empty_grad(g) if state is None else state.new_empty(state.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, g, beta)), dstate


_forward = Op(
    f"gated_delta_rule({OPERANDS}, float scale) -> (Tensor o, Tensor end, {SAVED})",
    triton=_forward_triton,
    reference=reference.chunked_rule,
    fake=_forward_fake,
)
_backward = Op(
    f"gated_delta_rule_backward(Tensor do, Tensor dend, {OPERANDS}, {SAVED}, float scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dstate)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)


@_forward.derivative
class _GatedDeltaRule(Derivative):
    @staticmethod
    def forward(ctx, run, q, k, v, g, beta, state, cu_seqlens, scale):
        o, end, *saved = run(q, k, v, g, beta, state, cu_seqlens, scale)
        ctx.save_for_backward(q, k, v, g, beta, state, cu_seqlens, *saved)
        ctx.scale, ctx.end = scale, (end.shape, end.dtype, end.device)
        ctx.set_materialize_grads(False)
        return o, end, *_forward.statistics(ctx, run, *saved)

    @staticmethod
    def backward(ctx, do, dend, *_):
        if do is None and dend is None:
            return (None,) * 9
        saved = q, _, v, _, _, state, *_ = ctx.saved_tensors
        if do is None:
            do = q.new_zeros(v.shape)
        if dend is None:
            shape, dtype, device = ctx.end
            dend = torch.zeros(shape, dtype=dtype, device=device)
        *grads, dstate = _backward(do, dend, *saved, ctx.scale)
        return None, *grads, None if state is None else dstate, None, None


@_backward.derivative
class _GatedDeltaRuleBackward(Derivative):
    @staticmethod
    def forward(ctx, run, do, dend, q, k, v, g, beta, state, cu_seqlens, *saved_and_scale):
        ctx.save_for_backward(do, dend, q, k, v, g, beta, state, cu_seqlens)
        ctx.scale = saved_and_scale[-1]
        return run(do, dend, q, k, v, g, beta, state, cu_seqlens, *saved_and_scale)

    @staticmethod
    def backward(ctx, *cotangents):
        *inputs, state, cu_seqlens = ctx.saved_tensors

        def backward(do, dend, q, k, v, g, beta, state):
            tensors = (q, k, v, g, beta, state, cu_seqlens)
            return reference.rule_backward(do, dend, *tensors, ctx.scale)

        cotangents = cotangents[:5] if state is None else cotangents
        # What is saved stands for what the inputs say, and has no gradients of its own.
        return None, *second_order(backward, (*inputs, state), cotangents), *(None,) * 5


def by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o and the state after the last token. The kernels get heads of whole vectors: columns of
    zeros add nothing to a product, and their states stay zero.
    """
    keys, values = q.shape[-1], v.shape[-1]
    more_keys, more_values = -keys % VECTOR, -values % VECTOR
    if more_keys:
        q, k = (F.pad(x, (0, more_keys)) for x in (q, k))
    if more_values:
        v = F.pad(v, (0, more_values))
    if state is not None and (more_keys or more_values):
        state = F.pad(state, (0, more_values, 0, more_keys))
    o, end, *_ = _forward(q, k, v, g, beta, state, cu_seqlens, scale)
    return o[..., :values], end[..., :keys, :values]
