"""Launch tables of what stands before and behind the memory as data: how much one program takes.

A table is read from the top; the first line that fits serves. The results do not depend on it, but
for the order in which the taps' gradient is added.

Source: results/tuning-input-h200-torch2.11-triton3.6.csv, bf16, 4 taps, heads of 64 columns; lines
for more taps, and TOKENS, are unmeasured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ._backends import Card


class RunTile(NamedTuple):
    """One program takes runs of ``run`` tokens (a power of two) of one head, as many as give each
    of its threads ``numbers`` numbers of one token. Serves where that makes at least ``fills``
    programs for each multiprocessor, and windows of up to ``taps``.
    """

    run: int
    numbers: int
    num_warps: int
    fills: float = 0.0
    taps: int = 8

    def rows(self, columns: int) -> int:
        """Runs of a program, at ``columns`` numbers a token, a power of two: no more than threads,
        at least one.
        """
        threads = 32 * self.num_warps
        return max(1, min(threads, threads * self.numbers // columns))

    def tokens(self, columns: int) -> int:
        """Of one program."""
        return self.run * self.rows(columns)


class InputTile(NamedTuple):
    """One program takes whole rows of a head, as many as have ``size`` bytes together."""

    size: int
    num_warps: int

    def rows(self, columns: int, dtype: torch.dtype) -> int:
        """Of ``columns`` numbers each, a power of two; at least one row."""
        return max(1, self.size // (columns * dtype.itemsize))


class SharesTile(NamedTuple):
    """One program adds the shares of ``numbers`` numbers, ``parts`` of them at a time."""

    numbers: int
    parts: int
    num_warps: int


class CountTile(NamedTuple):
    """One program looks at ``size`` tokens at a time."""

    size: int
    num_warps: int


class GatedTile(NamedTuple):
    """A warp takes ``numbers`` numbers of tokens, a program as many warps as one token needs, but
    no fewer than ``num_warps``; of the gates' weights it holds up to ``held`` numbers a thread.
    """

    numbers: int
    held: int
    num_warps: int

    def warps(self, columns: int) -> int:
        """Of a program whose tokens have ``columns`` numbers, a power of two."""
        return max(self.num_warps, columns // self.numbers)

    def rows(self, columns: int) -> int:
        """Tokens of a program: no more than threads, at least one."""
        warps = self.warps(columns)
        return max(1, min(32 * warps, warps * self.numbers // columns))

    def at_once(self, columns: int, logits: int) -> int:
        """Rows of the gates' weights that a program takes at a time, of ``logits``."""
        return max(1, min(logits, 32 * self.warps(columns) * self.held // columns))


class WeightsTile(NamedTuple):
    """One program takes ``columns`` columns of ``tokens`` tokens."""

    columns: int
    tokens: int


FORWARD = (
    RunTile(run=2, numbers=8, num_warps=2, taps=4),
    RunTile(run=2, numbers=4, num_warps=1),
)
BACKWARD = (
    RunTile(run=32, numbers=4, num_warps=1, fills=7.0, taps=4),
    RunTile(run=8, numbers=4, num_warps=1, taps=4),
    RunTile(run=16, numbers=4, num_warps=1),
)
ADD_SHARES = SharesTile(numbers=16, parts=128, num_warps=4)
# The rows are those of x, as wide as the layer.
TOKENS = InputTile(size=8192, num_warps=8)
COUNTED_TOKENS = CountTile(size=512, num_warps=2)
GATED_TOKENS = GatedTile(numbers=2048, held=80, num_warps=1)
# Both are programs of one launch.
GATED_TOKENS_BACKWARD = GatedTile(numbers=1024, held=20, num_warps=4)
GATE_WEIGHTS = WeightsTile(columns=64, tokens=32)


def run_tile(
    table: tuple[RunTile, ...], card: Card, taps: int, programs: Callable[[RunTile], int]
) -> RunTile:
    """The line that serves windows of ``taps``; ``programs`` says how many a line makes."""
    return next(
        line
        for line in table
        if taps <= line.taps and programs(line) >= line.fills * card.multiprocessors
    )
