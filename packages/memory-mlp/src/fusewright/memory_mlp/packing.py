"""Weights and momentum of a memory in one tensor, as the ops take them.

For a memory and its momentum the kernels read one row of 2 SIZE numbers, each half w1, the
transpose of w2, b1, b2 one after the other: both matrices are [hidden, D].
"""

from __future__ import annotations

import math

import torch

from .weights import MemoryWeights

Tensor = torch.Tensor


def pack(weights: MemoryWeights, momentum: MemoryWeights) -> Tensor:
    """``[*lead, 2, SIZE]``."""
    lead = weights.b1.shape[:-1]
    parts = [
        x.reshape(*lead, math.prod(x.shape[len(lead) :]))
        for half in (weights, momentum)
        for x in (half.w1, half.w2.mT, half.b1, half.b2)
    ]
    return torch.cat(parts, -1).unflatten(-1, (2, -1))


def unpack(state: Tensor, hidden: int, width: int) -> tuple[MemoryWeights, MemoryWeights]:
    """(weights, momentum), views of ``state [*lead, 2, SIZE]``."""
    sizes = (hidden * width, width * hidden, hidden, width)

    def half(x: Tensor) -> MemoryWeights:
        w1, w2, b1, b2 = x.split(sizes, -1)
        return MemoryWeights(
            w1.unflatten(-1, (hidden, width)), b1, w2.unflatten(-1, (hidden, width)).mT, b2
        )

    return half(state[..., 0, :]), half(state[..., 1, :])


def packed_size(hidden: int, width: int) -> int:
    """SIZE."""
    return 2 * hidden * width + hidden + width
