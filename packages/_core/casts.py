"""Weights in the dtype of the products that read them: one node of autograd for all of a layer, and
one launch each way where there are kernels for lists of tensors.

Autocast casts each by itself: a node, a launch and as many bytes beside it for every weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .precision import autocasts
from .registration import apply


def for_products(*weights: Tensor) -> Sequence[Tensor]:
    """Matrices of one dtype and device as autocast casts them for a product; themselves where there
    is none, and those in fp64. Their gradients are cast back together.
    """
    first = weights[0]
    if first.dtype == torch.float64 or not autocasts(first.device.type):
        return weights
    dtype = torch.get_autocast_dtype(first.device.type)
    return weights if dtype == first.dtype else apply(Cast, dtype, *weights)


def cast(dtype: torch.dtype, tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, ...]:
    """Copies in that dtype."""
    found = tuple([torch.empty_like(x, dtype=dtype) for x in tensors])
    torch._foreach_copy_(found, tensors)
    return found


class Cast(torch.autograd.Function):
    """Tensors in another dtype."""

    @staticmethod
    def forward(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        return cast(dtype, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype = inputs[1].dtype
        # What reads the copy of a frozen weight computes no gradient of it.
        frozen = [x for x, asked in zip(output, ctx.needs_input_grad[1:], strict=True) if not asked]
        ctx.mark_non_differentiable(*frozen)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [x for x in gradients if x is not None]
        found = iter(apply(Cast, ctx.dtype, *present) if present else ())
        return None, *[None if x is None else next(found) for x in gradients]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], dtype: torch.dtype, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        # Each number by itself: an axis more changes nothing.
        return Cast.apply(dtype, *tensors), in_dims[1:]
