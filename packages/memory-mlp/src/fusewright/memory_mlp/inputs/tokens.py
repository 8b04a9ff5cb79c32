"""Tokens that are left out of a memory and of its outputs: masked ones, and those that are not
finite; and the logits of the gates, from the same rows. One launch each, forward and backward; the
gradient of the gates' weights takes a second one.
"""

from __future__ import annotations

import torch

from .._core.backends import KERNEL_DTYPES, Backend, uses_triton
from .._core.precision import wide, without_autocast
from .._core.registration import Derivative, Op
from . import launch_tokens, reference
from .memory_input import Writes

Tensor = torch.Tensor

# The widest token that one program holds.
WIDEST_TOKEN = 8192


def _finite_reference(x, mask):
    y, present = reference.finite_tokens(x, mask)
    return y.contiguous(), present


def _finite_fake(x, mask):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.bool)


def _kept_reference(x, kept, mask, other):
    return reference.kept_tokens(x, kept, mask, other).contiguous()


def _kept_fake(x, kept, mask, other):
    return x.new_empty(x.shape)


def _gated_reference(x, weight, bias, mask):
    with without_autocast(x.device):
        y, *others = reference.gated_tokens(x, weight, bias, mask)
    return y.contiguous(), *others


def _gated_fake(x, weight, bias, mask):
    lead = x.shape[:-1]
    logits = wide(x).new_empty(*lead, len(weight))
    return x.new_empty(x.shape), x.new_empty(lead, dtype=torch.bool), logits


def _gated_backward_reference(y, *others):
    with without_autocast(y.device):
        return tuple(x.contiguous() for x in reference.gated_tokens_backward(y, *others))


def _gated_backward_fake(y, present, weight, dy, dlogits):
    return y.new_empty(y.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))


def _count_fake(written, skipped, position, mask, lost):
    counts = (skipped.new_empty(skipped.shape) for _ in range(2))
    return *counts, position.new_empty(position.shape)


_finite = Op(
    "finite_tokens(Tensor x, Tensor? mask) -> (Tensor y, Tensor present)",
    triton=launch_tokens.finite_tokens,
    reference=_finite_reference,
    fake=_finite_fake,
)
_kept = Op(
    "kept_tokens(Tensor x, Tensor kept, Tensor? mask, float other) -> Tensor",
    triton=launch_tokens.kept_tokens,
    reference=_kept_reference,
    fake=_kept_fake,
)


_gated = Op(
    "gated_tokens(Tensor x, Tensor weight, Tensor bias, Tensor? mask)"
    " -> (Tensor y, Tensor present, Tensor logits)",
    triton=launch_tokens.gated_tokens,
    reference=_gated_reference,
    fake=_gated_fake,
)
_gated_backward = Op(
    "gated_tokens_backward(Tensor y, Tensor present, Tensor weight, Tensor? dy, Tensor dlogits)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    triton=launch_tokens.gated_tokens_backward,
    reference=_gated_backward_reference,
    fake=_gated_backward_fake,
)
# Of whole numbers: it has no derivative.
_count = Op(
    "count_tokens(Tensor written, Tensor skipped, Tensor position, Tensor? mask, Tensor? lost)"
    " -> (Tensor now, Tensor total, Tensor later)",
    triton=launch_tokens.count_tokens,
    reference=reference.counted_tokens,
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


_gated_backward.derivative_of_reference()


def finite_tokens(x: Tensor, mask: Tensor | None, *, backend: Backend) -> tuple[Tensor, Tensor]:
    """x ``[B, T, dim]`` with zeros for tokens that are masked (``mask [B, T]`` is False) or not
    finite, and ``[B, T]`` which are neither. A gradient reaches those alone.
    """
    if uses_triton(x, backend) and x.shape[-1] <= WIDEST_TOKEN:
        return _finite(x, mask)
    return reference.finite_tokens(x, mask)


def gated_tokens(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None, *, backend: Backend
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`finite_tokens`, and their logits ``[B, T, n]`` in fp32 (fp64 for an fp64 x), under
    autocast too: ``y weight^T + bias``, with ``weight [n, dim]`` and ``bias [n]``.
    """
    if (
        uses_triton(x, backend)
        and x.shape[-1] <= WIDEST_TOKEN
        and weight.dtype == bias.dtype
        and weight.dtype in KERNEL_DTYPES
    ):
        return _gated(x, weight, bias, mask)
    with without_autocast(x.device):
        return reference.gated_tokens(x, weight, bias, mask)


def counted_tokens(
    writes: Writes,
    skipped: Tensor,
    position: Tensor,
    mask: Tensor | None,
    lost: Tensor | None,
    *,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens that a call did not write, skipped and position after it)``, from those before it;
    ``lost`` are the tokens of steps that were skipped, ``[B, heads]`` or None.
    """
    operands = writes.written, skipped, position, mask, lost
    if uses_triton(writes.alpha, backend):
        return _count(*operands)
    return reference.counted_tokens(*operands)


def kept_tokens(
    x: Tensor, kept: Tensor, mask: Tensor | None, other: float, *, backend: Backend
) -> Tensor:
    """x ``[B, T, dim]`` where all of ``kept [B, T, n]`` is True, ``other`` elsewhere; zeros where
    ``mask [B, T]`` is False. A gradient reaches what is kept alone.
    """
    if uses_triton(x, backend) and x.shape[-1] <= WIDEST_TOKEN:
        return _kept(x, kept, mask, other)
    return reference.kept_tokens(x, kept, mask, other)
