"""The order in which programs of the backward pass on Hopper add to dq, by the source of its kernel
with Python's numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace

import pytest
from fusewright.attention._core.launches import cdiv
from fusewright.attention.rectangular import kernels_hopper_backward as kernels
from fusewright.attention.rectangular.launch_hopper import parts_of
from fusewright.attention.rectangular.launch_hopper_backward import (
    HOPPER_BACKWARD,
    KEYS,
    QUERIES,
    Stripes,
    stripes_of,
)

from .ordered import Ordered, Step

TILES = 2


def chosen(
    all_heads: int,
    queries: int,
    keys: int,
    programs: int,
    heads: int = 1,
    ragged: bool = False,
    group: int = 1,
) -> Stripes:
    """The stripes of a call on a GPU of so many multiprocessors, with so many heads of keys a task,
    each read by a group of heads.
    """
    problem = SimpleNamespace(
        all_key_heads=all_heads,
        key_heads=heads,
        group=group,
        queries=queries,
        keys=keys,
        gpu=SimpleNamespace(multiprocessors=programs),
    )
    return stripes_of(problem, HOPPER_BACKWARD[0], ragged)


def drawn(draw: random.Random, heads: int, keys: int, programs: int) -> Stripes:
    """Any stripes that the kernel serves."""
    ranges = draw.randint(1, 4)
    sides = [n for n in range(1, programs + 1) if heads * ranges % n == 0]
    side = draw.choice(sides)
    return Stripes(ranges, cdiv(cdiv(keys, KEYS), ranges), side, programs // side * side)


class Programs(Ordered):
    """The programs of one launch, step by step: each step has its head, block of queries and tile,
    tile of keys, and number in the block.
    """

    def __init__(
        self, lengths: list[int], ragged: bool, queries: int, stripes: Stripes, gap: int
    ) -> None:
        ranges, key_tiles, side, programs = stripes
        heads, keys = len(lengths), max(lengths)
        self.query_tiles, self.key_tiles = cdiv(queries, QUERIES), key_tiles
        self.stripes = heads * ranges
        blocks, tiles = cdiv(self.query_tiles, TILES), self.stripes * key_tiles
        whole, parts = parts_of(tiles, blocks, programs, rounds=1)
        pieces = whole + (tiles - whole) * parts
        self.ranges, self.programs = ranges, min(programs, pieces)
        self.sizes = whole, parts, pieces, key_tiles, self.query_tiles, keys, 1, ranges
        self.config = SimpleNamespace(TILES=TILES, STRIPES=side, GAP=gap, RAGGED=ragged)
        numbers = dict(minimum=min, maximum=max, where=lambda test, x, y: x if test else y)
        gl = SimpleNamespace(num_programs=lambda axis: self.programs, **numbers)
        # One head a task.
        names = {"gl": gl, "KEYS": KEYS, "keys_of": lambda task, *_: lengths[task]}
        self.work_of, self.pieces_before, self.tile_at = (
            FunctionType(function.fn.__code__, names)
            for function in (kernels.work_of, kernels.pieces_before, kernels.tile_at)
        )

    def steps(self, program: int) -> Iterator[Step]:
        for piece in range(program, self.sizes[2], self.programs):
            (head, stripe, first_key, limit), (first, tiles, begin), turn = self.work_of(
                piece, self.sizes, None, self.config
            )
            assert head == stripe // self.ranges
            assert bool(tiles) == (limit > 0) or not self.config.RAGGED
            key_tile = first_key // KEYS
            for step in range(tiles):
                tile = self.tile_at(step, tiles, begin)
                number = self.pieces_before(tile // TILES, turn)
                block, begins = (first + tile) // TILES, tile % TILES == 0
                ends = step == tiles - 1
                yield Step(stripe, block, first + tile, key_tile, number, begins, ends)


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("seed", range(60))
def test_programs_add_every_tile_in_one_order_and_never_all_wait(seed, ragged):
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3, 4, 6, 7, 8, 12, 35])
    queries, keys = draw.randint(1, 2500), draw.randint(1, 2500)
    gpu_programs = draw.choice([1, 2, 5, 8, 12, 33, 132])
    gap = draw.choice([1, 2, 3, 5])
    stripes = chosen(heads, queries, keys, gpu_programs)
    if seed % 2:
        stripes = drawn(draw, heads, keys, gpu_programs)
    lengths = [keys] * heads
    if ragged:
        lengths[1:] = [draw.choice([0, 1, keys, draw.randint(0, keys)]) for _ in lengths[1:]]
    programs = Programs(lengths, ragged, queries, stripes, gap)
    order = programs.run(0)
    whole_order = dict(order)
    of_range = stripes.key_tiles
    for stripe in range(programs.stripes):
        first = stripe % programs.ranges * of_range
        tiles = range(first, first + of_range)
        if ragged:
            tiles = [tile for tile in tiles if tile * KEYS < lengths[stripe // programs.ranges]]
        for query_tile in range(programs.query_tiles):
            assert sorted(order.pop((stripe, query_tile), [])) == list(tiles)
    assert not order
    assert programs.run(1) == whole_order


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "expected"),
    [
        # 4 tasks of 11,000 queries, 1 of 55,000, of 205,000 and of 5,000.
        (32, 11000, 10000, (1, 79, 1, 132)),
        (8, 55000, 50000, (1, 391, 1, 132)),
        (8, 205000, 200000, (1, 1563, 1, 132)),
        (8, 5000, 200000, (1, 1563, 4, 132)),
        # Few queries.
        (32, 1024, 8192, (1, 64, 16, 128)),
        (8, 1024, 200000, (2, 782, 16, 128)),
        (1, 1000, 200000, (16, 98, 16, 128)),
        # Fewer keys of a head than programs have.
        (1600, 500, 500, (1, 4, 1, 132)),
    ],
)
def test_as_few_ranges_as_leave_hardly_a_program_without_work(heads, queries, keys, expected):
    assert chosen(heads, queries, keys, 132) == expected


@pytest.mark.parametrize(
    ("tasks", "heads", "queries", "keys", "side"),
    [
        (4, 8, 11000, 10000, 8),
        (1, 8, 1024, 200000, 16),
        (3, 7, 300, 2000, 42),
        (2, 200, 300, 300, 1),
    ],
)
def test_heads_of_a_long_ragged_task_lie_side_by_side(tasks, heads, queries, keys, side):
    assert chosen(tasks * heads, queries, keys, 132, heads, ragged=True).side == side


def test_heads_that_share_keys_are_more_queries_of_one_head():
    """Their tiles follow one another."""
    assert chosen(8, 1024, 8192, 132, group=4) == chosen(8, 4096, 8192, 132)
    # Each head has a tile that is not full.
    assert chosen(8, 1000, 8192, 132, group=4) == chosen(8, 4096, 8192, 132)


@pytest.mark.parametrize("seed", range(200))
def test_no_more_programs_at_a_stripe_than_it_has_blocks(seed):
    draw = random.Random(seed)
    heads, programs = draw.randint(1, 200), draw.choice([1, 16, 78, 114, 132, 144])
    queries, keys = (draw.choice([1, 60, 500, 5000, 200000]) + draw.randint(0, 500) for _ in "qk")
    ranges, key_tiles, side, used = chosen(heads, queries, keys, programs)
    assert ranges * key_tiles * KEYS >= keys
    assert heads * ranges % side == used % side == 0 < used <= programs
    assert min(used // side, key_tiles) <= cdiv(queries, QUERIES * TILES)
