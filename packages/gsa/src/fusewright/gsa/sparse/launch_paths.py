"""Which path a pass of sparse attention takes: a rule of the sizes alone, so that no call waits for
what the GPU has selected.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .launch_problem import SparseProblem, UnionConfig

Pass = Literal["forward", "dq", "dkdv"]


class PathRates(NamedTuple):
    """What a GPU reaches with numbers up to ``max_bytes``: bytes a second of gathered rows, and
    operations a second of products of tiles.
    """

    max_bytes: int
    gathered: float
    multiplied: float


class Preparation(NamedTuple):
    """What tiles need beforehand: seconds for the launches, and bits a second."""

    once: float
    bits: float


# The rule that chooses a path, in bytes gathered and operations multiplied a second. For short
# numbers: docs/decisions/0014-tiles-h200.csv, products of selections drawn at random and of as many
# heads of keys as of queries; for fp32 the products are unmeasured.
PATHS = {
    "forward": (PathRates(2, 6.0e12, 2.4e14), PathRates(4, 3.0e12, 2.0e13)),
    "dq": (PathRates(2, 5.7e12, 3.2e14), PathRates(4, 2.5e12, 1.5e13)),
    "dkdv": (PathRates(2, 1.3e12, 2.6e14), PathRates(4, 1.3e12, 1.5e13)),
}
# How many products of tiles a pass computes.
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
PREPARATION = Preparation(once=40e-6, bits=5e11)
# Gathering takes next to no memory: tiles are to be faster by this factor.
SMALLEST_SAVING = 0.9


def goes_by_tiles(problem: SparseProblem, of: Pass, path: str, config: UnionConfig) -> bool:
    """Whether a pass multiplies tiles; ``config``: the line of the tables that would serve it."""
    if not problem.keys or not problem.slots:
        return False
    if path == "auto":
        gathered, multiplied = seconds(problem, of, config)
        return multiplied < SMALLEST_SAVING * gathered
    return path == "tiles"


def seconds(problem: SparseProblem, of: Pass, config: UnionConfig) -> tuple[float, float]:
    """What a pass is expected to take query by query, and by tiles: bytes gathered, and operations
    of the products, over the measured rates.

    Nothing is assumed of the selections: as if they were drawn at random among the keys that a
    causal query sees, which is the worst for tiles.
    """
    rates = next(r for r in PATHS[of] if problem.dtype.itemsize <= r.max_bytes)
    bytes_each = 2 * problem.width * problem.dtype.itemsize
    per_list = problem.batches * problem.queries * problem.slots
    # Each key goes through its queries' heads one by one; a query reads a key for a whole group.
    readers = problem.heads if of == "dkdv" else problem.groups
    gathered = per_list * readers * bytes_each / rates.gathered

    tile = config.rows // config.stacked(problem.rows) if of != "dkdv" else config.rows
    visible = max(problem.keys - problem.queries / 2, 1.0)
    fraction = min(problem.slots / visible, 1.0)
    union = visible * (1.0 - (1.0 - fraction) ** tile)
    pairs = problem.batches * problem.heads * max(problem.queries, tile) * union
    multiplied = pairs * problem.width * PRODUCTS[of] * 2 / rates.multiplied
    # Bits are set, and read again for the lists.
    bits = problem.batches * problem.selections * problem.queries * problem.keys
    return gathered, multiplied + PREPARATION.once + bits / PREPARATION.bits
