"""The weights of a memory, and of its momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


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
        """``function`` of each of the four tensors, together with those of ``others``."""
        return MemoryWeights(*(function(*parts) for parts in zip(self, *others, strict=True)))


def weight_shapes(lead: Sequence[int], hidden: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Of w1, b1, w2 and b2."""
    return (*lead, hidden, width), (*lead, hidden), (*lead, width, hidden), (*lead, width)
