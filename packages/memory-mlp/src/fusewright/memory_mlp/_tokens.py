"""Tokens that are left out of a memory, and of what it says: masked ones, and those that are not
finite. One launch each, forward and backward.
"""

from __future__ import annotations

import torch

from . import input_reference
from ._backends import Backend, launchers, uses_triton
from ._registration import Derivative, Op

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


def finite_tokens(x: Tensor, mask: Tensor | None, *, backend: Backend) -> tuple[Tensor, Tensor]:
    """x ``[B, T, dim]`` with zeros for tokens that are masked (``mask [B, T]`` is False) or not
    finite, and ``[B, T]`` which are neither. A gradient reaches those alone.
    """
    if uses_triton(x, backend) and x.shape[-1] <= WIDEST_TOKEN:
        return _finite(x, mask)
    return input_reference.finite_tokens(x, mask)


def kept_tokens(
    x: Tensor, kept: Tensor, mask: Tensor | None, other: float, *, backend: Backend
) -> Tensor:
    """x ``[B, T, dim]`` where all of ``kept [B, T, n]`` is True, ``other`` elsewhere; zeros where
    ``mask [B, T]`` is False. A gradient reaches what is kept alone.
    """
    if uses_triton(x, backend) and x.shape[-1] <= WIDEST_TOKEN:
        return _kept(x, kept, mask, other)
    return input_reference.kept_tokens(x, kept, mask, other)
