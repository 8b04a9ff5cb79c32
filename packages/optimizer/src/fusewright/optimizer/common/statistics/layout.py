"""The layout of the learned optimizers' tensors in memory, and how programs divide them."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from ..tables import Blocks, upload
from .reference import exchanges_axes, factored_axes, memory_order

Tensor = torch.Tensor
# The kernels index the elements of one row of [A, X, B, Y, C] with 32 bits.
LONGEST_ROW = 2**30
# Of n elements one, divided by their root mean square, may be sqrt(n), and fp16 ends at 65504.
MOST = 65504**2


class Layout:
    """A tensor as ``[A, X, B, Y, C]`` in memory, X and Y its two longest axes.

    Attributes:
        exchanged: whether rows are the statistics' columns, and columns their rows.
        row_over_y: whether rows are means over Y and columns over X, or rows over X and columns
            over Y.
        row_means: how many means of rows there are for each decay.
    """

    def __init__(self, p: Tensor, *, velo: bool = False) -> None:
        self.length, self.factored, self.row_over_y = p.numel(), p.ndim > 1, True
        self.exchanged = exchanges_axes(p.shape, velo=velo)
        self.a, self.x, self.b, self.y, self.c = 1, 1, 1, self.length, 1
        axes = factored_axes(p.shape)
        if axes is not None:
            order = memory_order(p, range(p.ndim))
            first, last = sorted(order.index(axis) for axis in axes)
            sizes = [p.shape[axis] for axis in order]
            self.a, self.b, self.c = (
                math.prod(some)
                for some in (sizes[:first], sizes[first + 1 : last], sizes[last + 1 :])
            )
            self.x, self.y = sizes[first], sizes[last]
            self.row_over_y = order[last] == axes[not self.exchanged]
        self.yc, self.byc = self.y * self.c, self.b * self.y * self.c
        self.row_means = self.a * self.b * self.c if self.factored else 0

    def over(self, y: bool) -> tuple[int, int, int]:
        """Groups, length and inner size of the mean over Y, or over X."""
        if y:
            return self.a * self.x * self.b, self.y, self.c
        return self.a, self.x, self.byc

    def counts(self) -> tuple[int, int]:
        """How many row statistics there are for each decay, and how many columns."""
        if not self.factored:
            return self.length, 0
        row, column = self.over(self.row_over_y), self.over(not self.row_over_y)
        return row[0] * row[2], column[0] * column[2]

    def rows_line(self) -> tuple[int, int]:
        """Length and inner size of the second longest axis, over which rows are averaged."""
        return (self.x, self.b * self.c) if self.row_over_y else (self.y, self.c)


def too_long(p: Tensor) -> bool:
    """Whether a row of p has more elements than the kernels can index."""
    return p.ndim > 1 and Layout(p).byc > LONGEST_ROW


class Stretch(NamedTuple):
    """One program takes a stretch of one tensor in tiles of ``size`` elements: at least
    ``shortest`` elements, and more where a tensor would take over ``programs`` programs.
    ``registers`` bounds those of a thread on Hopper.
    """

    size: int
    num_warps: int
    shortest: int
    programs: int
    registers: int | None = None


class Stretches:
    """How programs divide tensors, but for ``others``: the kernels' table of shapes, and the tensor
    of each program.

    Attributes:
        counts: of each tensor the programs.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        stretch: Stretch,
        device: torch.device,
        others: Container[int] = (),
    ) -> None:
        lines, counts = [], []
        row_means = 0
        for place, layout in enumerate(layouts):
            span = max(stretch.shortest, -(-layout.length // stretch.programs))
            span = -(-span // stretch.size) * stretch.size
            counts.append(0 if place in others else -(-layout.length // span))
            lines += [layout.length, layout.x, layout.yc, layout.byc, layout.c, layout.b]
            lines += [int(layout.factored), int(layout.row_over_y), *layout.counts(), row_means]
            lines += [span, counts[-1]]
            row_means += 3 * layout.row_means
        self.counts = counts
        self.shapes = upload(lines, torch.int64, device)
        self.blocks = Blocks(counts, 1, device)
        self.stretch, self.grid = stretch, (self.blocks.count,)
        self.tables = self.shapes, *self.blocks.tables[1:]


class Strip(NamedTuple):
    """One program takes a strip of ``size`` columns of one matrix: at least ``shortest`` rows of
    it, and more where a matrix would take over about ``programs`` programs. ``registers`` as in
    ``Stretch``; ``ahead``: the next row is read before one is computed.
    """

    size: int
    num_warps: int
    shortest: int
    programs: int
    ahead: bool
    registers: int | None = None

    def serves(self, layout: Layout) -> bool:
        """Whether it is one matrix whose rows are contiguous, and whose columns fill four fifths of
        the strips.
        """
        is_plain = layout.factored and layout.a == layout.b == layout.c == 1
        padded = -(-layout.y // self.size) * self.size
        return is_plain and layout.length > 0 and 5 * layout.y >= 4 * padded


class Strips:
    """How programs divide these matrices, which have their places in a batch: the kernels' table of
    strips, and the matrix of each program.

    Attributes:
        places: of the matrices.
        lines: how many rows and columns they have together.
        counts: of each the programs.
    """

    def __init__(
        self,
        places: Sequence[int],
        layouts: Sequence[Layout],
        strip: Strip,
        device: torch.device,
    ) -> None:
        table: list[int] = []
        self.places, self.lines = places, 0
        self.counts: list[int] = []
        for place in places:
            layout = layouts[place]
            across = -(-layout.y // strip.size)
            span = max(strip.shortest, -(-layout.x * across // strip.programs))
            table += [place, layout.x, layout.y, self.lines, span]
            self.counts.append(across * -(-layout.x // span))
            self.lines += layout.x + layout.y
        self.table = upload(table or [0], torch.int64, device)
        self.blocks = Blocks(self.counts, 1, device)
        self.strip, self.grid = strip, (self.blocks.count,)
        self.tables = self.table, *self.blocks.tables[1:]
