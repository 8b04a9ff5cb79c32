"""Backward passes of the references: derivatives of their forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._core.registration import empty_grad, second_order

Tensor = torch.Tensor


def gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor],
    like: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of the inputs; an empty one, of the dtype of ``like``, for an absent input."""
    grads = second_order(function, inputs, cotangents)
    return tuple(empty_grad(like) if grad is None else grad for grad in grads)
