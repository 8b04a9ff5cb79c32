"""Launch tables of the learned optimizers as data.

STATISTICS and APPLY are of results/tuning-learned-h200-torch2.11-triton3.6.csv, the others
unmeasured: they take 3 % of a step, BACKWARD apart.
"""

from __future__ import annotations

from typing import NamedTuple


class Stretch(NamedTuple):
    """One program takes a stretch of one tensor in tiles of ``size`` elements: at least
    ``shortest`` elements, and more where a tensor would take over ``programs`` programs. On Hopper
    a thread takes at most so many ``registers``, where that is said.
    """

    size: int
    num_warps: int
    shortest: int
    programs: int
    registers: int | None = None


class SumTile(NamedTuple):
    """Squares over the middle axis of ``[groups, length, inner]``: tiles of ``lines`` by ``line``
    where inner is 1, else of ``tall`` by ``wide``; chunks of the middle axis are at least so many
    tiles long, and at most ``chunks`` many.
    """

    lines: int
    line: int
    tall: int
    wide: int
    tiles: int
    chunks: int
    num_warps: int


class Means(NamedTuple):
    """One program takes ``span`` column statistics, or one line of rows, in tiles of ``size`` by
    ``shares`` partial sums.
    """

    size: int
    shares: int
    span: int
    num_warps: int


class Sums(NamedTuple):
    """One program adds partial sums in tiles of ``rows`` by ``size``."""

    rows: int
    size: int
    num_warps: int


STATISTICS = Stretch(size=64, num_warps=1, shortest=1024, programs=1024)
# With more registers two programs share a multiprocessor, else three.
APPLY = Stretch(size=128, num_warps=4, shortest=2048, programs=2048, registers=168)
# Its products are IEEE: three of TF32 take more registers than there are.
BACKWARD = Stretch(size=32, num_warps=4, shortest=4096, programs=128)
SQUARES_OVER_AXES = SumTile(lines=16, line=128, tall=32, wide=64, tiles=16, chunks=64, num_warps=4)
MEANS = Means(size=128, shares=8, span=1024, num_warps=4)
FOLD = Sums(rows=64, size=32, num_warps=4)
SHARES = Sums(rows=16, size=128, num_warps=4)
