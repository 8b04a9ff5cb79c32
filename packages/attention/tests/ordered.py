"""The programs of a backward pass on Hopper, and the order in which they add to dq."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator


class Ordered:
    """Programs that wait for one another by the counters of blocks of queries."""

    programs: int

    def steps(self, program: int) -> Iterator[tuple[int, int, int, int, int, bool, bool]]:
        """(stripe, block, tile, key tile, number, whether the block begins, whether the piece ends)
        of what a program adds.
        """
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
                    if following[program] is None:
                        break
                    stripe, block, tile, key_tile, number, begins, ends = following[program]
                    if begins:
                        if program in holds:
                            counters[holds.pop(program)] += 1
                        if counters[stripe, block] != number:
                            break
                        holds[program] = stripe, block
                    order[stripe, tile].append(key_tile)
                    if ends:
                        counters[holds.pop(program)] += 1
                    following[program] = next(left[program], None)
            assert before != (following, counters.total()), "all programs wait"
        return dict(order)
