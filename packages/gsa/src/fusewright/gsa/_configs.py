"""Launch tables as data: how many queries and keys a tile has, by width and size of a number.

Each table is read from the top; the first line that fits serves. The results depend on a line only
by rounding.
Source: SCORES, SCORES_DQ and SCORES_DK for widths up to 64 by trial on an H200, of which no file is
kept yet; the others are unmeasured.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

# A product of tiles takes no fewer.
SMALLEST_TILE = 16


class TileConfig(NamedTuple):
    """Serves widths up to ``max_width`` of numbers up to ``max_bytes`` with tiles of ``queries``
    and ``keys`` rows. A line for Hopper serves compute capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    hopper: bool = False


class RowConfig(NamedTuple):
    """One program reads a row ``block`` numbers at a time."""

    block: int
    num_warps: int


class GatherConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes``, ``rows`` gathered rows at a
    time. A line for Hopper serves compute capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    rows: int
    num_warps: int
    num_stages: int
    hopper: bool = False


class SelectConfig(NamedTuple):
    """Serves rows of up to ``max_scores`` scores, of which one program takes a ``block`` at a time;
    where they are ``held``, that is all of them.

    ``written``: how many keys at a time are looked at for their indices. A thread of 32 held scores
    would take half as many registers again as ``max_registers``, and a card then half as many rows.
    ``halving``: whether scores are counted above the middle of a bracket, not in histograms. A lean
    line serves compute capability 9.0 alone, and no entropy: elsewhere it spills.
    """

    max_scores: float
    block: int
    held: bool
    written: int
    num_warps: int
    max_registers: int
    halving: bool = True
    lean: bool = False


SCORES = (
    TileConfig(128, 2, queries=64, keys=64, num_warps=4, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
SCORES_DQ = (
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, hopper=True),
    TileConfig(128, 2, queries=64, keys=32, num_warps=4, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
SCORES_DK = (
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=2, hopper=True),
    *SCORES_DQ[1:],
)
# So many scores are computed before they are selected from, and stay in the L2 cache of a card.
SCORES_AT_A_TIME = 1 << 23
# Rows of them start at multiples of so many.
SCORES_IN_LINE = 128
SELECT = (
    SelectConfig(256, 256, True, written=128, num_warps=1, max_registers=80),
    SelectConfig(512, 512, True, written=128, num_warps=1, max_registers=80),
    SelectConfig(1024, 1024, True, written=128, num_warps=1, max_registers=80),
    SelectConfig(2048, 2048, True, written=256, num_warps=2, max_registers=80),
    SelectConfig(4096, 4096, True, written=512, num_warps=4, max_registers=80),
    SelectConfig(8192, 8192, True, written=1024, num_warps=8, max_registers=80),
    SelectConfig(16384, 16384, True, written=2048, num_warps=16, max_registers=64, lean=True),
    SelectConfig(16384, 16384, True, written=2048, num_warps=16, max_registers=128),
    SelectConfig(
        float("inf"), 4096, False, written=1024, num_warps=8, max_registers=128, halving=False
    ),
)

TARGET = (
    TileConfig(128, 2, queries=64, keys=128, num_warps=8, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=64, keys=64, num_warps=8, num_stages=1, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
DIVERGENCE = RowConfig(block=2048, num_warps=4)
# Rows are selected keys of a query, and for dk and dv query heads of a key.
SPARSE = (
    GatherConfig(128, 2, rows=64, num_warps=4, num_stages=2, hopper=True),
    GatherConfig(256, 2, rows=32, num_warps=4, num_stages=1),
    GatherConfig(256, 4, rows=16, num_warps=8, num_stages=1),
)
SPARSE_DQ = (
    GatherConfig(128, 2, rows=32, num_warps=4, num_stages=2),
    GatherConfig(256, 2, rows=16, num_warps=4, num_stages=1),
    GatherConfig(256, 4, rows=16, num_warps=8, num_stages=1),
)
SPARSE_DKDV = (
    GatherConfig(64, 4, rows=32, num_warps=4, num_stages=2),
    GatherConfig(128, 4, rows=16, num_warps=4, num_stages=2),
    GatherConfig(256, 4, rows=16, num_warps=4, num_stages=1),
)
# So many queries of a key are one program's; the sums of more are added afterwards.
LIST_SEGMENT = 4096

Line = TypeVar("Line", TileConfig, GatherConfig)


def line_of(table: tuple[Line, ...], width: int, itemsize: int, capability: int) -> Line:
    """The first line that serves so wide rows of such numbers on such a card."""
    hopper = capability == 90
    return next(
        line
        for line in table
        if width <= line.max_width and itemsize <= line.max_bytes and (hopper or not line.hopper)
    )


def select_config(scores: int, lean: bool) -> SelectConfig:
    """The line for rows of so many scores; ``lean``: whether a lean one may serve."""
    return next(c for c in SELECT if scores <= c.max_scores and (lean or not c.lean))


def power_of_2(number: int) -> int:
    """The lowest power of 2 that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def block_width(width: int) -> int:
    """The columns of a tile of rows of this width."""
    return max(power_of_2(width), SMALLEST_TILE)
