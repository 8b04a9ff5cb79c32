"""The weights of a memory, and of its momentum: a tensor for each, or all of them packed in one, as
the ops take them.

For a memory and its momentum the kernels read one row of 2 SIZE numbers, each half w1, the
transpose of w2, b1, b2 one after the other: both matrices are [hidden, D].

What a scan returns are views of such a tensor, and the tensor goes with them: the next scan and
the next read take it as it is and copy nothing, nor do their gradients. To autograd it is a
function of the views, so that a gradient by one of them, or a hook of it, sees every use of the
state. Weights that came in any other way are packed by a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.internals import REGISTERS_AUTOGRAD
from .._core.registration import Derivative, is_plain_call

# The weights and biases (w1, b1, .., wn, bn) of a memory of n layers; of two, a MemoryWeights.
Weights = tuple[Tensor, ...]


class _Tensors(NamedTuple):
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


class MemoryWeights(_Tensors):
    """The memory M(x) = w2 act(w1 x + b1) + b2, or a momentum or gradient of that shape.

    Attributes:
        w1: ``[*lead, hidden, D]``; every index of the leading axes (rows of a batch, heads) has a
            memory of its own.
        b1: ``[*lead, hidden]``.
        w2: ``[*lead, D, hidden]``.
        b2: ``[*lead, D]``.
    """

    # Of weights that lie in one tensor [*lead, 2, SIZE] with a momentum: that tensor, to autograd a
    # function of both, and the momentum. No fields: a tuple made of other tensors has neither.
    _whole: Tensor | None = None
    _momentum: MemoryWeights | None = None

    def __getstate__(self) -> None:
        # What is saved or copied is the tuple. A copy of it shares no memory with the tensor.
        return None

    def map(self, function: Callable[..., Tensor], *others: MemoryWeights) -> MemoryWeights:
        """``function`` applied to each of the four tensors, and to those of ``others`` with it."""
        return MemoryWeights(*(function(*parts) for parts in zip(self, *others, strict=True)))


def weight_shapes(lead: Sequence[int], hidden: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Of w1, b1, w2 and b2."""
    return (*lead, hidden, width), (*lead, hidden), (*lead, width, hidden), (*lead, width)


def like(weights: Weights, tensors: Sequence[Tensor]) -> Weights:
    """``tensors`` as a tuple of the type of ``weights``."""
    # Not by the type of ``weights``: torch 2.11 cannot trace that of a tuple made in the graph.
    return MemoryWeights(*tensors) if isinstance(weights, MemoryWeights) else tuple(tensors)


def mapped(function: Callable[..., Tensor], weights: Weights, *others: Weights) -> Weights:
    """``function`` applied to each tensor, and to those of ``others`` with it."""
    return like(weights, [function(*parts) for parts in zip(weights, *others, strict=True)])


def pack(weights: MemoryWeights, momentum: MemoryWeights) -> Tensor:
    """``[*lead, 2, SIZE]``, the tensor itself where ``unpack`` made both of one."""
    whole = handed_on(weights, momentum)
    return packed_copy(weights, momentum) if whole is None else whole


def pack_weights(weights: MemoryWeights) -> Tensor:
    """``[*lead, 1, SIZE]``, or the tensor ``[*lead, 2, SIZE]`` of which ``unpack`` made them."""
    whole = handed_on(weights)
    return packed_copy(weights) if whole is None else whole


def handed_on(weights: MemoryWeights, momentum: MemoryWeights | None = None) -> Tensor | None:
    """The tensor that goes with these weights and, where one is given, this momentum."""
    # A compiler traces the tensors of a tuple alone.
    if torch.compiler.is_compiling():
        return None
    whole, partner = weights._whole, weights._momentum
    if whole is None or partner is None or (momentum is not None and momentum is not partner):
        return None
    if not whole.requires_grad and any(x.requires_grad for x in (*weights, *partner)):
        # They became leaves after that.
        return None
    return whole


def packed_copy(*halves: MemoryWeights) -> Tensor:
    """``[*lead, halves, SIZE]``, a copy."""
    lead = halves[0].b1.shape[:-1]
    parts = [
        x.reshape(*lead, math.prod(x.shape[len(lead) :]))
        for half in halves
        for x in (half.w1, half.w2.mT, half.b1, half.b2)
    ]
    return torch.cat(parts, -1).unflatten(-1, (len(halves), -1))


def unpack(state: Tensor, hidden: int, width: int) -> tuple[MemoryWeights, MemoryWeights]:
    """(weights, momentum), views of ``state [*lead, 2, SIZE]`` that ``pack`` and ``pack_weights``
    take together without a copy.
    """
    if not REGISTERS_AUTOGRAD or torch.compiler.is_compiling() or not is_plain_call((state,)):
        return views(state, hidden, width)
    whole = state.detach() if state.requires_grad else state
    if not (state.requires_grad and torch.is_grad_enabled()):
        weights, momentum = views_at_once(whole, hidden, width)
    else:
        parts = _Views.apply(state, hidden, width)
        weights, momentum = MemoryWeights(*parts[:4]), MemoryWeights(*parts[4:])
        whole = _Whole.apply(whole, hidden, width, *parts)
    weights._whole, weights._momentum = whole, momentum
    return weights, momentum


def views(state: Tensor, hidden: int, width: int) -> tuple[MemoryWeights, MemoryWeights]:
    """(weights, momentum), plain views of ``state [*lead, 2, SIZE]``."""
    # Split once more for the momentum: where only the weights are read, its gradient is one tensor.
    size = packed_size(hidden, width)
    *weights, momentum = state.flatten(-2).split((*part_sizes(hidden, width), size), -1)
    parts = momentum.split(part_sizes(hidden, width), -1)
    return shaped(hidden, width, *weights), shaped(hidden, width, *parts)


def views_at_once(state: Tensor, hidden: int, width: int) -> tuple[MemoryWeights, MemoryWeights]:
    """The same views, each by one operation where they were three, for where autograd records
    none.
    """
    *lead, _, size = state.shape
    *strides, half, last = state.stride()
    if last != 1 or half != size:
        return views(state, hidden, width)
    matrix = hidden * width

    def of_half(start: int) -> MemoryWeights:
        return MemoryWeights(
            state.as_strided((*lead, hidden, width), (*strides, width, 1), start),
            state.as_strided((*lead, hidden), (*strides, 1), start + 2 * matrix),
            state.as_strided((*lead, width, hidden), (*strides, 1, width), start + matrix),
            state.as_strided((*lead, width), (*strides, 1), start + 2 * matrix + hidden),
        )

    start = int(state.storage_offset())
    return of_half(start), of_half(start + size)


def detached(weights: Weights, momentum: Weights) -> tuple[Weights, Weights]:
    """The same numbers, cut from the graph; still in one tensor where they lay in one."""
    if isinstance(weights, MemoryWeights) and isinstance(momentum, MemoryWeights):
        whole = handed_on(weights, momentum)
        if whole is not None:
            return unpack(whole.detach(), *weights.w1.shape[-2:])
    return mapped(Tensor.detach, weights), mapped(Tensor.detach, momentum)


def unpack_weights(state: Tensor, hidden: int, width: int) -> MemoryWeights:
    """The weights, views of ``state [*lead, 1 or 2, SIZE]``."""
    return shaped(hidden, width, *state.select(-2, 0).split(part_sizes(hidden, width), -1))


def part_sizes(hidden: int, width: int) -> tuple[int, ...]:
    """How many numbers each tensor has in a half: w1, w2, b1, b2."""
    return hidden * width, width * hidden, hidden, width


def shaped(
    hidden: int, width: int, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor
) -> MemoryWeights:
    """One half from its parts."""
    matrix = (hidden, width)
    return MemoryWeights(w1.unflatten(-1, matrix), b1, w2.unflatten(-1, matrix).mT, b2)


def cast(weights: MemoryWeights, dtype: torch.dtype) -> MemoryWeights:
    """The weights in another dtype; one copy where they lie in one tensor."""
    whole = handed_on(weights)
    if whole is None:
        return weights.map(lambda x: x.to(dtype))
    return views(whole.to(dtype), *weights.w1.shape[-2:])[0]


def packed_size(hidden: int, width: int) -> int:
    """SIZE."""
    return 2 * hidden * width + hidden + width


class _Views(Derivative):
    """The four tensors of the weights, then those of the momentum, as views."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, hidden: int, width: int) -> tuple[Tensor, ...]:
        ctx.sizes = state.shape[:-2], hidden, width
        ctx.set_materialize_grads(False)
        weights, momentum = views_at_once(state, hidden, width)
        return *weights, *momentum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        known = next((g for g in grads if g is not None), None)
        if known is None:
            return None, None, None
        whole = whole_of(grads, *ctx.sizes)
        if whole is None:
            shapes = weight_shapes(*ctx.sizes) * 2
            filled = [
                known.new_zeros(shape) if g is None else g
                for g, shape in zip(grads, shapes, strict=True)
            ]
            whole = packed_copy(MemoryWeights(*filled[:4]), MemoryWeights(*filled[4:]))
        return whole, None, None


class _Whole(Derivative):
    """The tensor of which ``parts`` are the views: no copy, nor is its gradient copied."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, hidden: int, width: int, *parts: Tensor) -> Tensor:
        ctx.sizes = hidden, width
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        # Those of autograd have derivatives.
        parts = views if torch.is_grad_enabled() else views_at_once
        weights, momentum = parts(dwhole, *ctx.sizes)
        return None, None, None, *weights, *momentum


def whole_of(
    grads: Sequence[Tensor | None], lead: Sequence[int], hidden: int, width: int
) -> Tensor | None:
    """The contiguous tensor ``[*lead, 2, SIZE]`` of which all these, in order, are the ``views``;
    None where they are not, and where their own derivative is wanted.
    """
    first = grads[0]
    whole = None if first is None or torch.is_grad_enabled() else first._base
    size = 2 * packed_size(hidden, width)
    if whole is None or whole.shape != (*lead, 2, size // 2) or not whole.is_contiguous():
        return None
    *strides, _, _ = whole.stride()
    w1, w2, b1, b2 = itertools.accumulate(part_sizes(hidden, width)[:-1], initial=0)
    within = (width, 1), (1,), (1, width), (1,)
    start = whole.storage_offset()
    offsets = [start + half + part for half in (0, size // 2) for part in (w1, b1, w2, b2)]
    for g, offset, inner in zip(grads, offsets, within * 2, strict=True):
        if (
            g is None
            or g._base is not whole
            or g.storage_offset() != offset
            or g.stride() != (*strides, *inner)
        ):
            return None
    return whole
