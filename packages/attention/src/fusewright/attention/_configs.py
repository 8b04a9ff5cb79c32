"""Launch tables as data: how many rows of queries and of keys a tile has, by width of the head and
size of a number.

Each table is read from the top; the first line that fits serves. The algorithms do not depend on
it.
Source: results/tuning-h200-torch2.11-triton3.6.csv for the lines for Hopper, heads of 32, 64 and
128 columns in bf16, and docs/decisions/0004; the others are unmeasured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ._backends import Card

if TYPE_CHECKING:
    from ._problem import Problem

# A product of tiles takes no fewer.
SMALLEST_TILE = 16
# So many keys of a head are one tile, if it fits this often in the shared memory of a card.
SINGLE_TILE_KEYS = 128
SINGLE_TILE_FITS = 8


class TileConfig(NamedTuple):
    """Serves heads up to ``max_width`` of numbers up to ``max_bytes`` with tiles of ``queries`` and
    ``keys`` rows.

    A line for Hopper serves compute capability 9.0 alone, and heads whose width is a power of 2;
    with ``descriptors``, operands that tensor descriptors span, and reads by them.
    """

    max_width: int
    max_bytes: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    descriptors: bool = False


class SingleTileConfig(NamedTuple):
    """Serves up to ``max_keys`` keys of heads up to ``max_width`` of numbers up to ``max_bytes``,
    ``queries`` rows at a time; ``hopper`` as in a TileConfig.
    """

    max_keys: int
    max_width: int
    max_bytes: int
    queries: int
    num_warps: int
    num_stages: int
    hopper: bool = False


HOPPER = dict(hopper=True)
DESCRIBED = dict(hopper=True, descriptors=True)

FORWARD = (
    TileConfig(32, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=128, keys=64, num_warps=8, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=32, keys=32, num_warps=8, num_stages=2),
)
DQ = (
    TileConfig(32, 2, queries=64, keys=64, num_warps=4, num_stages=4, **DESCRIBED),
    TileConfig(64, 2, queries=128, keys=64, num_warps=4, num_stages=4, **DESCRIBED),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=128, keys=64, num_warps=8, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=32, keys=16, num_warps=8, num_stages=2),
)
DKDV = (
    TileConfig(32, 2, queries=32, keys=128, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **DESCRIBED),
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=32, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=32, keys=64, num_warps=4, num_stages=2),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2),
)
# Of a band no more than some tiles are seen, so small ones waste less at its borders. Measured are
# the lines of heads of 64 and 40 columns in bf16; those of 40 serve a long band and a segment of
# TitanMAC.
WINDOW_FORWARD = (
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=2, **HOPPER),
    TileConfig(16, 2, queries=64, keys=32, num_warps=4, num_stages=2),
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=64, keys=32, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
WINDOW_DQ = (
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=2),
    TileConfig(128, 4, queries=16, keys=32, num_warps=8, num_stages=2),
)
WINDOW_DKDV = (
    TileConfig(64, 2, queries=32, keys=64, num_warps=4, num_stages=2),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2),
    TileConfig(16, 4, queries=16, keys=16, num_warps=4, num_stages=2),
    TileConfig(64, 4, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2),
)
SINGLE_TILE_FORWARD = (
    SingleTileConfig(128, 64, 2, queries=64, num_warps=4, num_stages=3),
    SingleTileConfig(128, 128, 2, queries=32, num_warps=4, num_stages=2),
    SingleTileConfig(128, 128, 4, queries=16, num_warps=8, num_stages=2),
)
SINGLE_TILE_BACKWARD = (
    SingleTileConfig(16, 64, 2, queries=32, num_warps=4, num_stages=2),
    SingleTileConfig(64, 64, 2, queries=64, num_warps=4, num_stages=3, **HOPPER),
    SingleTileConfig(64, 64, 2, queries=32, num_warps=8, num_stages=3),
    SingleTileConfig(128, 32, 2, queries=64, num_warps=4, num_stages=2, **HOPPER),
    SingleTileConfig(128, 32, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(128, 64, 2, queries=16, num_warps=4, num_stages=3, **HOPPER),
    SingleTileConfig(128, 64, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(64, 128, 2, queries=64, num_warps=8, num_stages=3, **HOPPER),
    SingleTileConfig(64, 128, 2, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(16, 32, 4, queries=16, num_warps=4, num_stages=2),
    SingleTileConfig(16, 64, 4, queries=16, num_warps=4, num_stages=1),
    SingleTileConfig(128, 16, 4, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(128, 32, 4, queries=32, num_warps=16, num_stages=1),
    SingleTileConfig(64, 128, 4, queries=32, num_warps=16, num_stages=1),
)


# Where tasks and heads are fewer programs than so many for each multiprocessor, the queries of each
# are cut into chunks.
FORWARD_PROGRAMS_PER_SM = 8
BACKWARD_PROGRAMS_PER_SM = 2


class AddChunksConfig(NamedTuple):
    """One program adds ``block`` elements of the chunks' shares."""

    block: int
    num_warps: int


ADD_CHUNKS = AddChunksConfig(block=256, num_warps=4)


class RotaryConfig(NamedTuple):
    """One program turns ``pairs`` pairs of columns, and as many of the rows beside them; of a
    prefix it carries as many columns, of up to ``batches`` rows of the batch at a time.
    """

    pairs: int
    num_warps: int
    batches: int


ROTARY = RotaryConfig(pairs=512, num_warps=4, batches=16)


def tile_config(table: tuple[TileConfig, ...], problem: Problem) -> TileConfig:
    """The line for heads of this width, in memory as these."""
    return next(
        line
        for line in table
        if problem.width <= line.max_width
        and problem.dtype.itemsize <= line.max_bytes
        and (on_hopper(problem) or not line.hopper)
        and (problem.described or not line.descriptors)
    )


def single_tile_config(table: tuple[SingleTileConfig, ...], problem: Problem) -> SingleTileConfig:
    """The line for so many keys of heads of this width."""
    return next(
        line
        for line in table
        if problem.keys <= line.max_keys
        and problem.width <= line.max_width
        and problem.dtype.itemsize <= line.max_bytes
        and (on_hopper(problem) or not line.hopper)
    )


def chunk_rows(tasks: int, queries: int, block: int, programs: int) -> int:
    """How many queries a chunk has, in whole blocks, so that the chunks of so many tasks and heads
    make about this number of programs.
    """
    chunks = max(1, programs // tasks)
    return max(1, -(-queries // (chunks * block))) * block


def on_hopper(problem: Problem) -> bool:
    """Whether the lines for Hopper serve."""
    return problem.card.capability == 90 and problem.width == power_of_2(problem.width)


def is_single_tile(keys: int, width: int, itemsize: int, card: Card) -> bool:
    """Whether all keys of a head are one tile."""
    # A comparison is all that is asked of the keys: when a compiler traces shapes that vary, their
    # number is a symbol.
    fitting = card.shared_bytes // (SINGLE_TILE_FITS * power_of_2(width) * itemsize)
    return keys <= min(SINGLE_TILE_KEYS, 1 << (max(fitting, 1).bit_length() - 1))


def power_of_2(number: int) -> int:
    """The lowest power of 2 that is not below ``number``, nor below what a product of tiles
    takes.
    """
    return max(SMALLEST_TILE, 1 << max(0, number - 1).bit_length())
