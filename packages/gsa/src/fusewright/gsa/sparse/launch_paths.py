"""Which path a call of sparse attention takes: a rule of the sizes and of the GPU's capability
alone, so that no call waits for what the GPU has selected. All passes of a call follow one choice.
"""

from __future__ import annotations

from typing import NamedTuple

from .launch_problem import SparseProblem, stacked


class Ways(NamedTuple):
    """Which of its passes a call computes by tiles: those over the keys of each query, which are o
    and dq, and those over the queries of each key, dk and dv.
    """

    of_queries: bool
    of_keys: bool


class PathRates(NamedTuple):
    """What a GPU reaches with heads up to ``max_width`` of numbers up to ``max_bytes``: bytes a
    second of gathered rows, and operations a second of products of tiles of ``rows``. A line for
    Hopper serves compute capability 9.0 alone.
    """

    max_width: int
    max_bytes: int
    rows: int
    gathered: float
    multiplied: float
    hopper: bool = False


class Preparation(NamedTuple):
    """What tiles need beforehand: seconds for the launches, and bits a second."""

    once: float
    bits: float


# The rule that chooses a path, in bytes gathered and operations multiplied a second. For short
# numbers on Hopper: docs/decisions/0014-tiles-h200.csv, products of selections drawn at random and
# of as many heads of keys as of queries. The others are unmeasured: of other GPUs the nominal rates
# of a multiprocessor, half of the L2 cache's and a quarter of the products'.
QUERIES = (
    PathRates(256, 2, 64, 6.0e12, 2.4e14, hopper=True),
    PathRates(256, 4, 32, 3.0e12, 2.0e13, hopper=True),
    PathRates(256, 2, 64, 3.0e12, 6.0e13),
    PathRates(256, 4, 32, 1.5e12, 1.0e13),
)
KEYS = (
    PathRates(256, 2, 64, 1.3e12, 2.6e14, hopper=True),
    PathRates(256, 4, 32, 1.3e12, 1.5e13, hopper=True),
    PathRates(256, 2, 64, 6.5e11, 6.5e13),
    PathRates(256, 4, 32, 6.5e11, 7.5e12),
)
# How many products of tiles o, and dk with dv, are.
QUERIES_PRODUCTS, KEYS_PRODUCTS = 2, 4
PREPARATION = Preparation(once=40e-6, bits=1.3e12)
# What neighbouring queries have in common of the keys that each of them selects; the others are as
# if drawn at random: between a random selection and a trained indexer's. Unmeasured.
SHARED = 5 / 8
# Gathering takes next to no memory: tiles are to be faster by this factor.
SMALLEST_SAVING = 0.9


def ways(problem: SparseProblem, path: str) -> Ways:
    """The choice for all passes of a call. What ``auto`` takes is a path of its own where it
    gathers for each query and multiplies tiles for each key, which gathering serves head by head.
    """
    if not problem.keys or not problem.slots or path == "queries":
        return Ways(of_queries=False, of_keys=False)
    if path == "tiles":
        return Ways(of_queries=True, of_keys=True)
    return Ways(of_queries=pays(*of_queries(problem)), of_keys=pays(*of_keys(problem)))


def pays(gathered: float, multiplied: float) -> bool:
    """Whether tiles that take so many seconds are taken rather than gathering."""
    return multiplied < SMALLEST_SAVING * gathered


def of_queries(problem: SparseProblem) -> tuple[float, float]:
    """The seconds that o takes, gathered and by tiles; dq takes them in nearly the same ratio. A
    query reads a key for a whole group of heads.
    """
    rates = problem.config(QUERIES)
    tile = max(rates.rows // stacked(problem.rows), 1)
    return seconds(problem, rates, problem.groups, tile, QUERIES_PRODUCTS)


def of_keys(problem: SparseProblem) -> tuple[float, float]:
    """The seconds that dk and dv take. Each key goes through its queries' heads one by one."""
    rates = problem.config(KEYS)
    return seconds(problem, rates, problem.heads, rates.rows, KEYS_PRODUCTS)


def seconds(
    problem: SparseProblem, rates: PathRates, readers: int, tile: int, products: int
) -> tuple[float, float]:
    """Bytes gathered by so many readers of each selection, and operations of so many products of
    tiles of so many queries or keys, over the rates.

    Of a query's keys its neighbours have a part in common, and each draws the others at random
    among the keys that a causal query sees.
    """
    bytes_each = 2 * problem.width * problem.dtype.itemsize
    per_list = problem.batches * problem.queries * problem.slots
    gathered = per_list * readers * bytes_each / rates.gathered

    visible = max(problem.keys - problem.queries / 2, 1.0)
    shared = min(SHARED * problem.slots, visible)
    fraction = min((1.0 - SHARED) * problem.slots / visible, 1.0)
    union = min(shared + visible * (1.0 - (1.0 - fraction) ** tile), visible)
    pairs = problem.batches * problem.heads * max(problem.queries, tile) * union
    multiplied = pairs * problem.width * products * 2 / rates.multiplied
    # Bits are set, and read again for the lists.
    bits = problem.batches * problem.selections * problem.queries * problem.keys
    return gathered, multiplied + PREPARATION.once + bits / PREPARATION.bits
