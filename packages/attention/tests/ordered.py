"""The programs of a backward pass on Hopper, and the order in which they add to dq."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """What a program adds to a tile of queries of a stripe: its block, the tile of keys, the number
    of pieces that the block has before, whether the block begins, whether the last of the piece's
    additions to memory ends. Where it does not ``add`` to memory, it takes the sum from there.
    """

    stripe: int
    block: int
    tile: int
    key_tile: int
    number: int
    begins: bool
    ends: bool
    adds: bool = True


class Ordered:
    """Programs that wait for one another by the counters of blocks of queries."""

    programs: int

    def steps(self, program: int) -> Iterator[Step]:
        """What a program adds, in order."""
        raise NotImplementedError

    def run(self, seed: int) -> dict[tuple[int, int], list[int]]:
        """For each tile of queries of a stripe the tiles of keys in the order in which they were
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
                    step = following[program]
                    if step is None:
                        break
                    counter = step.stripe, step.block
                    if not step.adds and counters[counter] < step.number:
                        break
                    if step.begins:
                        if program in holds:
                            counters[holds.pop(program)] += 1
                        if counters[counter] != step.number:
                            break
                        holds[program] = counter
                    order[step.stripe, step.tile].append(step.key_tile)
                    if step.ends:
                        counters[holds.pop(program)] += 1
                    following[program] = next(left[program], None)
            assert before != (following, counters.total()), "all programs wait"
        return dict(order)
