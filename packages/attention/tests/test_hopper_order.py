"""The order in which programs of the backward pass on Hopper add to dq, by the source of its kernel
with Python's numbers.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
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
    side_by_side,
)

TILES = 2


def side_of(heads: int, queries: int, programs: int, share: float) -> int:
    """Of how many heads pieces lie side by side, with so many blocks wanted for each program."""
    gpu = SimpleNamespace(multiprocessors=programs)
    problem = SimpleNamespace(all_heads=heads, queries=queries, gpu=gpu)
    return side_by_side(problem, HOPPER_BACKWARD[0]._replace(blocks=share))


class Programs:
    """The programs of one launch, step by step: each step has its head, block of queries and tile,
    tile of keys, and number in the block.
    """

    def __init__(
        self, heads: int, queries: int, keys: int, programs: int, gap: int, share: float
    ) -> None:
        self.query_tiles, self.key_tiles = cdiv(queries, QUERIES), cdiv(keys, KEYS)
        blocks, tiles = cdiv(self.query_tiles, TILES), heads * self.key_tiles
        side = side_of(heads, queries, programs, share) or 1
        whole, parts = parts_of(tiles, blocks, programs, rounds=1)
        pieces = whole + (tiles - whole) * parts
        self.heads, self.programs = heads, min(programs, pieces)
        self.sizes = whole, parts, pieces, self.key_tiles, self.query_tiles, 1
        self.config = SimpleNamespace(TILES=TILES, HEADS=side, GAP=gap)
        numbers = dict(minimum=min, maximum=max, where=lambda test, x, y: x if test else y)
        gl = SimpleNamespace(num_programs=lambda axis: self.programs, **numbers)
        self.work_of, self.pieces_before, self.tile_at = (
            FunctionType(function.fn.__code__, {"gl": gl})
            for function in (kernels.work_of, kernels.pieces_before, kernels.tile_at)
        )

    def steps(self, program: int) -> Iterator[tuple[int, int, int, int, int, bool, bool]]:
        """(head, block, tile, key tile, number, whether the block begins, whether the piece ends)
        of what a program adds.
        """
        for piece in range(program, self.sizes[2], self.programs):
            (head, key_tile), (first, tiles, begin), turn = self.work_of(
                piece, self.sizes, self.config
            )
            for step in range(tiles):
                tile = self.tile_at(step, tiles, begin)
                number = self.pieces_before(tile // TILES, turn)
                block, begins = (first + tile) // TILES, tile % TILES == 0
                yield head, block, first + tile, key_tile, number, begins, step == tiles - 1

    def run(self, seed: int) -> dict[tuple[int, int], list[int]]:
        """For each tile of queries of a head the tiles of keys in the order in which they were
        added, where programs go on at random.
        """
        draw, order, counters = random.Random(seed), defaultdict(list), Counter()
        left = {p: self.steps(p) for p in range(self.programs)}
        following = {p: next(steps, None) for p, steps in left.items()}
        holds: dict[int, tuple[int, int]] = {}
        while any(following.values()):
            before = dict(following), counters.total()
            for program in draw.sample(range(self.programs), self.programs):
                for _ in range(draw.randint(1, 4)):
                    if following[program] is None:
                        break
                    head, block, tile, key_tile, number, begins, ends = following[program]
                    if begins:
                        if program in holds:
                            counters[holds.pop(program)] += 1
                        if counters[head, block] != number:
                            break
                        holds[program] = head, block
                    order[head, tile].append(key_tile)
                    if ends:
                        counters[holds.pop(program)] += 1
                    following[program] = next(left[program], None)
            assert before != (following, counters.total()), "all programs wait"
        return dict(order)


@pytest.mark.parametrize("seed", range(40))
def test_programs_add_every_tile_in_one_order_and_never_all_wait(seed):
    draw = random.Random(seed)
    programs = Programs(
        heads=draw.choice([1, 2, 3, 4, 6, 8, 12]),
        queries=draw.randint(1, 2500),
        keys=draw.randint(1, 2500),
        programs=draw.choice([1, 2, 5, 8, 12, 33, 132]),
        gap=draw.choice([1, 2, 3, 5]),
        share=draw.choice([0.0, 0.5, 0.625, 1.0]),
    )
    order = programs.run(0)
    assert len(order) == programs.heads * programs.query_tiles
    assert all(sorted(keys) == list(range(programs.key_tiles)) for keys in order.values())
    assert programs.run(1) == order


@pytest.mark.parametrize(
    ("heads", "queries", "expected"),
    [
        # 4 tasks of 11,000 queries, 1 of 205,000 and of 5,000.
        (32, 11000, 1),
        (8, 205000, 1),
        (8, 5000, 4),
        # Programs would wait for one another.
        (16, 1024, 0),
        (64, 256, 0),
        (7, 1300, 0),
        (35, 256, 0),
        (67, 64, 0),
    ],
)
def test_as_few_heads_side_by_side_as_have_blocks_for_the_programs(heads, queries, expected):
    assert side_of(heads, queries, 132, HOPPER_BACKWARD[0].blocks) == expected
