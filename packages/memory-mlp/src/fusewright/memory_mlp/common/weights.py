"""The weights of a memory, and of its momentum: a tensor for each, or all of them packed in one, as
the ops take them.

For a memory and its momentum the kernels read one row of 2 SIZE numbers, each half w1, the
transpose of w2, b1, b2 one after the other: both matrices are [hidden, D].

What a scan returns are views of such a tensor. The next scan and the next read find it again
through them and copy nothing, nor do their gradients. The gradient does not pass through the views,
unless they retain it or have a hook of their own; where anything else stands between them and the
tensor, such as a function that scales a gradient, they are packed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The weights and biases (w1, b1, .., wn, bn) of a memory of n layers; of two, a MemoryWeights.
Weights = tuple[Tensor, ...]
# Autograd's nodes from a tensor to the views that ``unpack`` makes of it.
VIEWS = {"ViewBackward0", "SplitWithSizesBackward0", "TransposeBackward0"}


class MemoryWeights(NamedTuple):
    """The memory M(x) = w2 act(w1 x + b1) + b2, or a momentum or gradient of that shape.

    Attributes:
        w1: ``[*lead, hidden, D]``; every index of the leading axes (rows of a batch, heads) has a
            memory of its own.
        b1: ``[*lead, hidden]``.
        w2: ``[*lead, D, hidden]``.
        b2: ``[*lead, D]``.
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

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
    """``[*lead, 2, SIZE]``, the tensor itself where these are the views that ``unpack`` makes."""
    whole = packed(weights, momentum)
    return packed_copy(weights, momentum) if whole is None else whole


def pack_weights(weights: MemoryWeights) -> Tensor:
    """``[*lead, 1, SIZE]``, or the tensor ``[*lead, 2, SIZE]`` where these are views that
    ``unpack`` makes.
    """
    whole = packed(weights)
    return packed_copy(weights) if whole is None else whole


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
    """(weights, momentum), views of ``state [*lead, 2, SIZE]``."""
    # Split once more for the momentum: where only the weights are read, its gradient is one tensor.
    size = packed_size(hidden, width)
    *weights, momentum = state.flatten(-2).split((*part_sizes(hidden, width), size), -1)
    parts = momentum.split(part_sizes(hidden, width), -1)
    return shaped(hidden, width, *weights), shaped(hidden, width, *parts)


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


def packed(weights: MemoryWeights, momentum: MemoryWeights | None = None) -> Tensor | None:
    """The tensor ``[*lead, 2, SIZE]`` of which these, all of them, are the views that ``unpack``
    makes; None where they are not.
    """
    hidden, width = weights.w1.shape[-2:]
    # A view names the tensor it was made of, unless it is detached or traced by a compiler; its
    # tangent is its own.
    no_base = torch.compiler.is_compiling() or forward_ad._current_level >= 0
    whole = None if no_base else weights.w1._base
    if whole is None or whole.shape != (*weights.b1.shape[:-1], 2, packed_size(hidden, width)):
        return None
    views = unpack(whole.detach(), hidden, width)
    for half, view in zip((weights, momentum), views, strict=True):
        if half is not None and not all(map(is_view, half, [whole] * 4, view)):
            return None
    return whole


def is_view(x: Tensor, whole: Tensor, view: Tensor) -> bool:
    """Whether x, a view of ``whole``, is the same as ``view`` and does not retain its gradient."""
    return (
        x._base is whole
        and x.requires_grad == whole.requires_grad
        and not (x.retains_grad or x._backward_hooks or x.is_neg())
        and x.dtype == view.dtype
        and x.shape == view.shape
        and x.stride() == view.stride()
        and x.storage_offset() == view.storage_offset()
        and (not x.requires_grad or only_views_between(x, whole))
    )


def only_views_between(x: Tensor, whole: Tensor) -> bool:
    """Whether the gradient of x reaches ``whole`` as it is."""
    node, end = x.grad_fn, whole.grad_fn
    while node is not None and node is not end:
        if end is None and getattr(node, "variable", None) is whole:
            return True
        if node.name() not in VIEWS:
            return False
        node = node.next_functions[0][0]
    return node is not None


def cast(weights: MemoryWeights, dtype: torch.dtype) -> MemoryWeights:
    """The weights in another dtype; one copy where they lie in one tensor."""
    whole = packed(weights)
    if whole is None:
        return weights.map(lambda x: x.to(dtype))
    return unpack(whole.to(dtype), *weights.w1.shape[-2:])[0]


def packed_size(hidden: int, width: int) -> int:
    """SIZE."""
    return 2 * hidden * width + hidden + width
