"""The weights of a memory of three layers or more, packed in one tensor as its kernels take them.

Each half of [2, SIZE], weights and momentum, is w1^T [D, HIDDEN], w2 .. w(n-1) [HIDDEN, HIDDEN], wn
[D, HIDDEN], then b1 .. bn, one after the other: the rows of every matrix have HIDDEN numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .weights import Weights

Tensor = torch.Tensor


def deep_matrices(layers: int, hidden: int, width: int) -> int:
    """How many numbers the matrices have."""
    return 2 * hidden * width + (layers - 2) * hidden * hidden


def deep_size(layers: int, hidden: int, width: int) -> int:
    """SIZE."""
    return deep_matrices(layers, hidden, width) + (layers - 1) * hidden + width


def deep_shapes(
    lead: Sequence[int], layers: int, hidden: int, width: int
) -> tuple[tuple[int, ...], ...]:
    """Of w1, b1, .., wn, bn."""
    widths = [width, *(hidden,) * (layers - 1), width]
    shapes: list[tuple[int, ...]] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        shapes += [(*lead, fan_out, fan_in), (*lead, fan_out)]
    return tuple(shapes)


def pack_deep(*halves: Weights) -> Tensor:
    """``[*lead, halves, SIZE]``, a copy."""
    lead = halves[0][1].shape[:-1]
    parts = [x.flatten(len(lead)) for half in halves for x in in_order(half)]
    return torch.cat(parts, -1).unflatten(-1, (len(halves), -1))


def in_order(half: Weights) -> list[Tensor]:
    """The tensors of one half as they are packed."""
    first, *matrices = half[::2]
    return [first.mT, *matrices, *half[1::2]]


def unpack_deep(state: Tensor, layers: int, hidden: int, width: int) -> tuple[Weights, ...]:
    """The halves of ``state [*lead, halves, SIZE]``, plain views."""
    matrix = hidden * hidden
    sizes = [hidden * width, *(matrix,) * (layers - 2), hidden * width, *(hidden,) * (layers - 1)]
    halves = []
    for index in range(state.shape[-2]):
        parts = state.select(-2, index).split([*sizes, width], -1)
        matrices = [x.unflatten(-1, (-1, hidden)) for x in parts[:layers]]
        tensors = zip([matrices[0].mT, *matrices[1:]], parts[layers:], strict=True)
        halves.append(tuple(x for pair in tensors for x in pair))
    return tuple(halves)
