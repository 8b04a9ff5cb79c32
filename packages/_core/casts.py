"""Weights in the dtype of the products that read them: one node of autograd for all of a layer, and
one launch each way where there are kernels for lists of tensors.

Autocast casts each by itself: a node, a launch and as many bytes beside it for every weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .backends import known_obstacle
from .internals import REGISTERS_AUTOGRAD
from .launches import Launch, cdiv, is_current
from .lazy import lazy_module
from .precision import autocasts
from .registration import apply, is_plain_call

if TYPE_CHECKING:
    from . import kernels_casts as kernels
else:
    kernels = lazy_module(__package__, "kernels_casts")

# Tensors that the kernel takes, what a program casts of one, and the most that one may have. No
# other BLOCK is measured.
TOGETHER = 6
BLOCK = 4096
MOST_ELEMENTS = 1 << 30


def for_products(*weights: Tensor) -> Sequence[Tensor]:
    """Matrices of one dtype and device as autocast casts them for a product; themselves where there
    is none, and those in fp64. Their gradients are cast back together.
    """
    first = weights[0]
    if first.dtype == torch.float64 or not autocasts(first.device.type):
        return weights
    dtype = torch.get_autocast_dtype(first.device.type)
    return weights if dtype == first.dtype else apply(Cast, dtype, *weights)


def cast(dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of tensors of one dtype and device in ``dtype``."""
    found = tuple([torch.empty_like(x, dtype=dtype) for x in tensors])
    if serves(tensors):
        cast_by_kernel(tensors, found)
    else:
        torch._foreach_copy_(found, tuple(tensors))
    return found


def serves(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel takes them, with the bits of torch: its own launch for lists has too few
    programs for the weights of one layer (docs/decisions/0024).
    """
    first = tensors[0]
    if not first.is_cuda or known_obstacle(first.device, first.dtype) is not None:
        return False
    return is_current(first.device) and takes(tensors)


def takes(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel that reads their memory, unseen by torch, reads what they hold."""
    if torch.compiler.is_compiling() or not REGISTERS_AUTOGRAD or not is_plain_call(tensors):
        return False
    return all(x.is_contiguous() and 0 < x.numel() <= MOST_ELEMENTS for x in tensors)


def cast_by_kernel(tensors: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Write the contiguous ``tensors``, cast, into those ``found``."""
    for first in range(0, len(tensors), TOGETHER):
        some, casts = tensors[first : first + TOGETHER], found[first : first + TOGETHER]
        numels = tuple([x.numel() for x in some])
        launch = plan(numels, some[0].dtype, casts[0].dtype, some[0].device)
        absent = (None,) * (TOGETHER - len(some))
        launch((*some, *absent, *casts, *absent))


@functools.lru_cache(maxsize=4096)
def plan(
    numels: tuple[int, ...], dtype: torch.dtype, result: torch.dtype, device: torch.device
) -> Launch:
    """The launch for tensors of so many elements; the dtypes are a part of the key."""
    programs = sum(cdiv(numel, BLOCK) for numel in numels)
    numels += (0,) * (TOGETHER - len(numels))
    return Launch(kernels.cast_kernel, (programs,), device, numels, dict(num_warps=4), BLOCK=BLOCK)


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
