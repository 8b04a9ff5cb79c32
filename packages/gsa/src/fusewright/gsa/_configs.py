"""Launch tables as data: how many queries and keys a tile has, by width and size of a number; and
the rates by which sparse attention chooses its path.

Each table is read from the top; the first line that fits serves. The results depend on a line only
by rounding.
Source: SELECT and the size of its parts: docs/decisions/0014-selection-h200.csv; UNION tables for
widths up to 64 and those of lists: 0014-tiles-h200.csv; SCORES, SCORES_DQ and SCORES_DK for widths
up to 64 by trial on an H200, of which no file is kept yet; the others are unmeasured.
"""

from __future__ import annotations

import math
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


class UnionConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes`` by tiles of ``rows``, which
    are queries with up to ``stack`` heads each, or keys; and of ``columns``, which are listed keys,
    or listed queries with their heads. A line for Hopper serves compute capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    stack: int = 8
    hopper: bool = False

    def stacked(self, heads: int) -> int:
        """How many of so many heads are stacked: a power of 2 that divides them."""
        return math.gcd(heads, self.stack)


class ListConfig(NamedTuple):
    """One program lists what one tile needs, ``block`` candidates at a time."""

    block: int
    num_warps: int


class PathRates(NamedTuple):
    """What a card reaches with numbers up to ``max_bytes``: bytes a second of gathered rows, and
    operations a second of products of tiles.
    """

    max_bytes: int
    gathered: float
    multiplied: float


class Preparation(NamedTuple):
    """What tiles need beforehand: seconds for the launches, and bits a second."""

    once: float
    bits: float


class SelectConfig(NamedTuple):
    """Serves rows of up to ``max_scores`` scores, of which one program takes a ``block`` at a time;
    where they are ``held`` in registers, that is all of them.

    A lean line serves compute capability 9.0 alone, and no entropy: elsewhere it spills.
    """

    max_scores: float
    block: int
    num_warps: int
    max_registers: int
    held: bool = True
    lean: bool = False

    @property
    def runs(self) -> int:
        """Into how many runs a block is cut, of each of which a thread has four neighbours."""
        return max(self.block // (128 * self.num_warps), 1)


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
    *SCORES_DQ[1:3],
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1, hopper=True),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1, hopper=True),
    TileConfig(256, 4, queries=16, keys=16, num_warps=4, num_stages=1),
)
# So many are computed before they are used, and stay in the L2 cache of a card.
SCORES_AT_A_TIME = 1 << 23
# So many before keys are selected by them, 128 MiB: fewer leave a card idle where rows are long.
SCORES_TO_SELECT = 1 << 25
# Rows of scores start at multiples of so many.
SCORES_IN_LINE = 128
# Rows of up to so many scores are one part, whatever line serves them.
SHORT_ROW = 2048
SELECT = (
    SelectConfig(256, 256, num_warps=1, max_registers=80),
    SelectConfig(512, 512, num_warps=1, max_registers=80),
    SelectConfig(1024, 1024, num_warps=1, max_registers=128),
    SelectConfig(2048, 2048, num_warps=2, max_registers=64, lean=True),
    SelectConfig(4096, 4096, num_warps=4, max_registers=64, lean=True),
    SelectConfig(8192, 8192, num_warps=8, max_registers=64, lean=True),
    SelectConfig(16384, 16384, num_warps=16, max_registers=64, lean=True),
    SelectConfig(2048, 2048, num_warps=2, max_registers=168),
    SelectConfig(4096, 4096, num_warps=4, max_registers=168),
    SelectConfig(8192, 8192, num_warps=8, max_registers=168),
    SelectConfig(16384, 16384, num_warps=32, max_registers=64),
    SelectConfig(math.inf, 4096, num_warps=8, max_registers=80, held=False),
)
# A row that reads its scores again lists and holds a block of those in question, if that is so many
# times the most keys that it may select.
LISTED = 2

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
    GatherConfig(256, 4, rows=16, num_warps=4, num_stages=1),
)
SPARSE_DKDV = (
    GatherConfig(64, 4, rows=32, num_warps=4, num_stages=2),
    GatherConfig(128, 4, rows=16, num_warps=4, num_stages=2),
    GatherConfig(256, 4, rows=16, num_warps=4, num_stages=1, hopper=True),
    GatherConfig(256, 4, rows=8, num_warps=4, num_stages=1),
)
# So many queries of a key are one program's; the sums of more are added afterwards.
LIST_SEGMENT = 4096
# Tiles of the union of what queries have selected, and of the queries that have selected a key.
UNION = (
    UnionConfig(64, 2, rows=64, columns=128, num_warps=4, num_stages=3, hopper=True),
    UnionConfig(128, 2, rows=128, columns=64, num_warps=8, num_stages=2, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=4, num_stages=2),
    UnionConfig(256, 2, rows=32, columns=32, num_warps=4, num_stages=1),
    UnionConfig(64, 4, rows=32, columns=16, num_warps=4, num_stages=1),
    UnionConfig(256, 4, rows=16, columns=16, num_warps=8, num_stages=1),
)
UNION_DQ = (
    UnionConfig(64, 2, rows=64, columns=64, num_warps=4, num_stages=3, hopper=True),
    UnionConfig(128, 2, rows=64, columns=64, num_warps=4, num_stages=2, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=8, num_stages=2),
    UnionConfig(256, 2, rows=32, columns=32, num_warps=4, num_stages=1),
    UnionConfig(64, 4, rows=16, columns=32, num_warps=4, num_stages=1, hopper=True),
    UnionConfig(64, 4, rows=16, columns=32, num_warps=8, num_stages=1),
    UnionConfig(256, 4, rows=16, columns=16, num_warps=8, num_stages=1),
)
UNION_DKDV = (
    UnionConfig(64, 2, rows=64, columns=64, num_warps=4, num_stages=3, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=4, num_stages=2, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=8, num_stages=2),
    UnionConfig(256, 2, rows=32, columns=16, num_warps=4, num_stages=1),
    UnionConfig(64, 4, rows=32, columns=16, num_warps=4, num_stages=1, hopper=True),
    UnionConfig(64, 4, rows=32, columns=32, num_warps=8, num_stages=1),
    UnionConfig(256, 4, rows=16, columns=32, num_warps=8, num_stages=1, hopper=True),
    UnionConfig(256, 4, rows=16, columns=32, num_warps=4, num_stages=1),
)
MEMBERS = ListConfig(block=512, num_warps=4)
KEYS_OF_TILES = ListConfig(block=1024, num_warps=8)
QUERIES_OF_TILES = ListConfig(block=1024, num_warps=4)
# Bits for so many pairs of a query and a key are held at a time, 128 MiB of bits, and lists beside
# them: no more than five times the int32 indices of these queries, or four times the bits.
MEMBERS_AT_A_TIME = 1 << 30
# The rule that chooses a path, in bytes gathered and operations multiplied a second. For short
# numbers: docs/decisions/0014-tiles-h200.csv, products of selections drawn at random and of as many
# heads of keys as of queries; for fp32 the products are unmeasured.
PATHS = {
    "forward": (PathRates(2, 6.0e12, 2.4e14), PathRates(4, 3.0e12, 2.0e13)),
    "dq": (PathRates(2, 5.7e12, 3.2e14), PathRates(4, 2.5e12, 1.5e13)),
    "dkdv": (PathRates(2, 1.3e12, 2.6e14), PathRates(4, 1.3e12, 1.5e13)),
}
PREPARATION = Preparation(once=40e-6, bits=5e11)
# Gathering takes next to no memory: tiles are to be faster by this factor.
SMALLEST_SAVING = 0.9

Line = TypeVar("Line", TileConfig, GatherConfig, UnionConfig)


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
