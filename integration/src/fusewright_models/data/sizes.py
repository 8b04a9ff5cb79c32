"""Numbers of points that are drawn, and the few that batches of all of them are padded to.

A step that is captured has one size of everything. So a batch is padded up to the next of a few
capacities, each of which has a graph: the fewer they are, the more rows are padding. With m sizes
of context points in a capacity and n of targets, a task is padded by (m - 1) / 2 + (n - 1) / 2 rows
on average, and each row takes as long as any other: the best grid has cells as small, and as
square, as the number of graphs allows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# A graph costs two eager steps and a capture; with so many a task of a Gaussian process is padded
# from 38 rows to 47 on average, with one to 92.
MOST_CAPACITIES = 16


@dataclass(frozen=True)
class Size:
    """A number of points, drawn uniformly from ``low`` to ``high``, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a size wants 1 <= low <= high; got {self.low} and {self.high}")

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read "64" or "3-46"."""
        low, dash, high = text.partition("-")
        try:
            return cls(int(low), int(high) if dash else int(low))
        except ValueError as error:
            message = f"a size is a count such as 64 or a range such as 3-46; got {text!r}"
            raise ValueError(message) from error

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)

    def __contains__(self, number: int) -> bool:
        return self.low <= number <= self.high

    @property
    def is_one(self) -> bool:
        """Whether there is nothing to draw."""
        return self.low == self.high

    def parts(self, width: int) -> Iterator[Size]:
        """Sizes of at most ``width`` numbers each, as equal as can be."""
        numbers = self.high - self.low + 1
        parts = math.ceil(numbers / width)
        starts = [self.low + numbers * part // parts for part in range(parts + 1)]
        return (Size(low, after - 1) for low, after in pairwise(starts))


class Capacity(NamedTuple):
    """The sizes that one graph serves: those of batches that are padded to the largest of each."""

    contexts: Size
    targets: Size


def capacities_of(sizes: Mapping[int, Size]) -> list[Capacity]:
    """The finest grid of at most ``MOST_CAPACITIES`` capacities.

    Args:
        sizes: for each M of a range the N that a batch may have beside it.
    """
    every = [_hull(sizes.values()), Size(min(sizes), max(sizes))]
    # Wider cells than these are as many.
    widths = {
        math.ceil((each.high - each.low + 1) / parts)
        for each in every
        for parts in range(1, MOST_CAPACITIES + 1)
    }
    grids = (_grid(sizes, width) for width in sorted(widths))
    return next(grid for grid in grids if len(grid) <= MOST_CAPACITIES)


def _grid(sizes: Mapping[int, Size], width: int) -> list[Capacity]:
    """Capacities of at most ``width`` M and ``width`` N; the N of few M are not those of all."""
    return [
        Capacity(contexts, targets)
        for contexts in Size(min(sizes), max(sizes)).parts(width)
        for targets in _hull(
            [sizes[number] for number in range(contexts.low, contexts.high + 1)]
        ).parts(width)
    ]


def _hull(sizes: Iterable[Size]) -> Size:
    """The smallest that has all of them."""
    every = [*sizes]
    return Size(min(each.low for each in every), max(each.high for each in every))
