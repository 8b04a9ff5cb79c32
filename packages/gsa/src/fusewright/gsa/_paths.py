"""Which path a pass of sparse attention takes: a rule of the sizes alone, so that no call waits for
what the card has found.
"""

from __future__ import annotations

from typing import Literal

from ._configs import PATHS, PREPARATION, SMALLEST_SAVING, UnionConfig
from ._sparse_problem import Sparse

Pass = Literal["forward", "dq", "dkdv"]


def goes_by_tiles(sparse: Sparse, of: Pass, path: str, config: UnionConfig) -> bool:
    """Whether a pass multiplies tiles; ``config``: the line of the tables that would serve it."""
    if not sparse.keys or not sparse.slots:
        return False
    if path == "auto":
        gathered, multiplied = seconds(sparse, of, config)
        return multiplied < SMALLEST_SAVING * gathered
    return path == "tiles"


def seconds(sparse: Sparse, of: Pass, config: UnionConfig) -> tuple[float, float]:
    """What a pass is expected to take query by query, and by tiles: bytes gathered, and operations
    of the products, over the measured rates.

    Nothing is assumed of the selections: as if they were drawn at random among the keys that a
    causal query sees, which is the worst for tiles.
    """
    rates = next(r for r in PATHS[of] if sparse.dtype.itemsize <= r.max_bytes)
    bytes_each = 2 * sparse.width * sparse.dtype.itemsize
    per_list = sparse.batches * sparse.queries * sparse.slots
    # Each key goes through its queries' heads one by one; a query reads a key for a whole group.
    readers = sparse.heads if of == "dkdv" else sparse.groups
    gathered = per_list * readers * bytes_each / rates.gathered

    tile = config.rows // config.stacked(sparse.rows) if of != "dkdv" else config.rows
    visible = max(sparse.keys - sparse.queries / 2, 1.0)
    share = min(sparse.slots / visible, 1.0)
    union = visible * (1.0 - (1.0 - share) ** tile)
    pairs = sparse.batches * sparse.heads * max(sparse.queries, tile) * union
    multiplied = pairs * sparse.width * products(of) * 2 / rates.multiplied
    # Bits are set, and read again for the lists.
    bits = sparse.batches * sparse.selections * sparse.queries * sparse.keys
    return gathered, multiplied + PREPARATION.once + bits / PREPARATION.bits


def products(of: Pass) -> int:
    """How many products of tiles a pass computes."""
    return {"forward": 2, "dq": 3, "dkdv": 4}[of]
