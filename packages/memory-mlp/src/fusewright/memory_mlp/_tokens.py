"""Tokens that are left out of a memory, and of what it says: masked ones, and those that are not
finite; with them the logits of the gates, which are computed of the same rows. One launch each,
forward and backward, where the gates' weights add a second one.
"""

from __future__ import annotations

import torch

from . import input_reference
from ._backends import KERNEL_DTYPES, Backend, launchers, uses_triton, without_autocast
from ._registration import Derivative, Op, second_order
from .memory_state import MemoryState, Writes

Tensor = torch.Tensor

# What one program holds of a token.
WIDEST_TOKEN = 8192


def _finite_triton(x, mask):
    return launchers().launch_finite_tokens(x, mask)


def _finite_reference(x, mask):
    y, present = input_reference.finite_tokens(x, mask)
    return y.contiguous(), present


def _finite_fake(x, mask):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.bool)


def _kept_triton(x, kept, mask, other):
    return launchers().launch_kept_tokens(x, kept, mask, other)


def _kept_reference(x, kept, mask, other):
    return input_reference.kept_tokens(x, kept, mask, other).contiguous()


def _kept_fake(x, kept, mask, other):
    return x.new_empty(x.shape)


def _gated_triton(x, weight, bias, mask):
    return launchers().launch_gated_tokens(x, weight, bias, mask)


def _gated_reference(x, weight, bias, mask):
    with without_autocast(x.device):
        y, *others = input_reference.gated_tokens(x, weight, bias, mask)
    return y.contiguous(), *others


def _gated_fake(x, weight, bias, mask):
    lead = x.shape[:-1]
    logits = input_reference.wide(x).new_empty(*lead, len(weight))
    return x.new_empty(x.shape), x.new_empty(lead, dtype=torch.bool), logits


def _gated_backward_triton(y, *others):
    return launchers().launch_gated_tokens_backward(y, *others)


def _gated_backward_reference(y, *others):
    with without_autocast(y.device):
        return tuple(x.contiguous() for x in input_reference.gated_tokens_backward(y, *others))


def _gated_backward_fake(y, present, weight, dy, dlogits):
    return y.new_empty(y.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))


def _count_triton(written, *others):
    return launchers().launch_count_tokens(written, *others)


def _count_fake(written, skipped, position, mask, lost):
    counts = (skipped.new_empty(skipped.shape) for _ in range(2))
    return *counts, position.new_empty(position.shape)


_finite = Op(
    "finite_tokens(Tensor x, Tensor? mask) -> (Tensor y, Tensor present)",
    triton=_finite_triton,
    reference=_finite_reference,
    fake=_finite_fake,
)
_kept = Op(
    "kept_tokens(Tensor x, Tensor kept, Tensor? mask, float other) -> Tensor",
    triton=_kept_triton,
    reference=_kept_reference,
    fake=_kept_fake,
)


_gated = Op(
    "gated_tokens(Tensor x, Tensor weight, Tensor bias, Tensor? mask)"
    " -> (Tensor y, Tensor present, Tensor logits)",
    triton=_gated_triton,
    reference=_gated_reference,
    fake=_gated_fake,
)
_gated_backward = Op(
    "gated_tokens_backward(Tensor y, Tensor present, Tensor weight, Tensor? dy, Tensor dlogits)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    triton=_gated_backward_triton,
    reference=_gated_backward_reference,
    fake=_gated_backward_fake,
)
# Of whole numbers: it has no derivative.
_count = Op(
    "count_tokens(Tensor written, Tensor skipped, Tensor position, Tensor? mask, Tensor? lost)"
    " -> (Tensor now, Tensor total, Tensor later)",
    triton=_count_triton,
    reference=input_reference.counted_tokens,
    fake=_count_fake,
)


@_finite.derivative
class _FiniteTokens(Derivative):
    @staticmethod
    def forward(ctx, run, x, mask):
        y, present = run(x, mask)
        ctx.mark_non_differentiable(present)
        ctx.save_for_backward(present)
        ctx.set_materialize_grads(False)
        return y, present

    @staticmethod
    def backward(ctx, dy, _):
        if dy is None:
            return None, None, None
        (present,) = ctx.saved_tensors
        return None, _kept(dy, present.unsqueeze(-1), None, 0.0), None


@_kept.derivative
class _KeptTokens(Derivative):
    @staticmethod
    def forward(ctx, run, x, kept, mask, other):
        ctx.save_for_backward(kept, mask)
        return run(x, kept, mask, other)

    @staticmethod
    def backward(ctx, dy):
        return None, _kept(dy, *ctx.saved_tensors, 0.0), None, None, None


@_gated.derivative
class _GatedTokens(Derivative):
    @staticmethod
    def forward(ctx, run, x, weight, bias, mask):
        y, present, logits = run(x, weight, bias, mask)
        ctx.mark_non_differentiable(present)
        ctx.save_for_backward(y, present, weight)
        ctx.set_materialize_grads(False)
        return y, present, logits

    @staticmethod
    def backward(ctx, dy, _, dlogits):
        y, present, weight = ctx.saved_tensors
        if dlogits is not None:
            dx, dweight, dbias = _gated_backward(y, present, weight, dy, dlogits)
            return None, dx, dweight, dbias, None
        dx = None if dy is None else _kept(dy, present.unsqueeze(-1), None, 0.0)
        return None, dx, None, None, None


@_gated_backward.derivative
class _GatedTokensBackward(Derivative):
    @staticmethod
    def forward(ctx, run, y, present, weight, dy, dlogits):
        ctx.save_for_backward(y, present, weight, dy, dlogits)
        return run(y, present, weight, dy, dlogits)

    @staticmethod
    def backward(ctx, *cotangents):
        y, present, *others = ctx.saved_tensors

        def backward(y, *others):
            return _gated_backward_reference(y, present, *others)

        dy, *grads = second_order(backward, (y, *others), cotangents)
        return None, dy, None, *grads


def finite_tokens(x: Tensor, mask: Tensor | None, *, backend: Backend) -> tuple[Tensor, Tensor]:
    """x ``[B, T, dim]`` with zeros for tokens that are masked (``mask [B, T]`` is False) or not
    finite, and ``[B, T]`` which are neither. A gradient reaches those alone.
    """
    if uses_triton(x, backend) and x.shape[-1] <= WIDEST_TOKEN:
        return _finite(x, mask)
    return input_reference.finite_tokens(x, mask)


def gated_tokens(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None, *, backend: Backend
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`finite_tokens`, and of its tokens ``[B, T, n]`` in fp32 (fp64 of an fp64 x), whatever
    autocast holds: ``y weight^T + bias``, of ``weight [n, dim]`` and ``bias [n]``.
    """
    if (
        uses_triton(x, backend)
        and x.shape[-1] <= WIDEST_TOKEN
        and weight.dtype == bias.dtype
        and weight.dtype in KERNEL_DTYPES
    ):
        return _gated(x, weight, bias, mask)
    with without_autocast(x.device):
        return input_reference.gated_tokens(x, weight, bias, mask)


def counted_tokens(
    state: MemoryState,
    writes: Writes,
    mask: Tensor | None,
    lost: Tensor | None,
    *,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens that a call did not write, skipped and position after it)`` where it began in
    ``state``; ``lost`` is what else its steps did not write, ``[B, heads]`` or None.
    """
    operands = writes.written, state.skipped, state.position, mask, lost
    if uses_triton(writes.alpha, backend):
        return _count(*operands)
    return input_reference.counted_tokens(*operands)


def kept_tokens(
    x: Tensor, kept: Tensor, mask: Tensor | None, other: float, *, backend: Backend
) -> Tensor:
    """x ``[B, T, dim]`` where all of ``kept [B, T, n]`` is True, ``other`` elsewhere; zeros where
    ``mask [B, T]`` is False. A gradient reaches what is kept alone.
    """
    if uses_triton(x, backend) and x.shape[-1] <= WIDEST_TOKEN:
        return _kept(x, kept, mask, other)
    return input_reference.kept_tokens(x, kept, mask, other)
