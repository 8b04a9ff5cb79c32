"""Launch tables of the pooled update as data: how much of a product, or how many elements, one
program takes.

A table is read from the top; the first line that fits serves. The algorithms do not depend on it.

Source: results/tuning-update-h200-torch2.11-triton3.6.csv for the tiles of Hopper and the blocks of
elements. At the sizes that it serves there, a tile is at most 3 % slower than the fastest, a block,
which serves every size and dtype, 7 %. Other tiles, ADD_SPLITS, and what row weights and the
gradient of the loss ask for have not been measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ._backends import Card


class UpdateTile(NamedTuple):
    """Serves products of one ``precision`` ("narrow": bf16 and fp16, "tf32", "ieee") with tiles of
    ``rows`` by ``cols`` that walk ``depth`` numbers at a time.

    It does where these make at least ``fills`` programs for each multiprocessor and, with
    ``aligned``, where all rows start at multiples of 16 numbers; a line for Hopper on compute
    capability 9.0 alone.
    """

    precision: str
    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    fills: float = 0.0
    aligned: bool = True
    hopper: bool = False


class UpdateBlock(NamedTuple):
    """One program takes ``block`` elements of one tensor."""

    block: int
    num_warps: int


HOPPER: dict[str, Any] = dict(hopper=True)
# Serve wherever no line above does.
ANY: dict[str, Any] = dict(rows=32, cols=32, depth=32, num_warps=4, num_stages=2, aligned=False)
REST = tuple(UpdateTile(precision, **ANY) for precision in ("narrow", "tf32", "ieee"))

HIDDEN = (
    UpdateTile("narrow", 128, 128, 64, num_warps=8, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 128, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *REST,
)
RESIDUAL = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 128, 64, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 32, 64, num_warps=4, num_stages=6, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *REST,
)
# Row weights take more registers than those tiles leave.
WEIGHTED_RESIDUAL = HIDDEN
SLOPE = (
    UpdateTile("narrow", 128, 64, 64, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 64, 128, 32, num_warps=4, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *REST,
)
GRADIENTS_REST = (
    REST[0]._replace(num_warps=8),
    *(line._replace(num_stages=1) for line in REST[1:]),
)
GRADIENTS = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=7, fills=0.8, **HOPPER),
    UpdateTile("narrow", 64, 128, 64, num_warps=4, num_stages=4, fills=0.8, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=8, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 128, 32, num_warps=8, num_stages=7, fills=0.8, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.2, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=8, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=3),
    *GRADIENTS_REST,
)
P_BAR = (
    UpdateTile("narrow", 128, 64, 64, num_warps=8, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 128, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=8, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *REST,
)
E_BAR = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 128, 64, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("narrow", 64, 64, 32, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 128, 32, num_warps=8, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=2),
    *REST,
)
Z_BAR = (
    UpdateTile("narrow", 128, 64, 64, num_warps=8, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3, **HOPPER),
    UpdateTile("narrow", 64, 64, 32, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=2),
    *REST,
)
# Where e_bar and r are computed at once there are as many sums as in Z_BAR.
E_BAR_AND_R = Z_BAR
DK = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 128, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 32, 128, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("narrow", 64, 64, 32, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 128, 32, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=2),
    *REST,
)
DWEIGHTS = (
    UpdateTile("narrow", 64, 128, 128, num_warps=4, num_stages=4, fills=0.8, **HOPPER),
    UpdateTile("narrow", 64, 64, 128, num_warps=4, num_stages=7, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 64, 128, 64, num_warps=4, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.2, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=8, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=3),
    *GRADIENTS_REST,
)

# A side of the square tiles that are turned.
TURN = UpdateBlock(block=64, num_warps=8)
ROUND = UpdateBlock(block=512, num_warps=4)
STEP = UpdateBlock(block=512, num_warps=4)
ADD_SPLITS = UpdateBlock(block=512, num_warps=4)
INNER_PRODUCTS = UpdateBlock(block=1024, num_warps=4)
COTANGENTS = UpdateBlock(block=1024, num_warps=8)

# From this compute capability on, programs of a launch are placed while the launch before it ends.
OVERLAP_FROM = 90

# Where the tiles of the weights' gradients are fewer programs than so many for each multiprocessor,
# several share the rows of a tile, none of them fewer rows than this.
SPLIT_BELOW = 0.5
ROWS_OF_A_SPLIT = 512


def update_tile(
    table: tuple[UpdateTile, ...],
    precision: str,
    card: Card,
    aligned: bool,
    rows: int,
    cols: int,
    count: int,
) -> UpdateTile:
    """The line for ``count`` products of ``rows`` by ``cols``."""
    return next(
        line
        for line in table
        if line.precision == precision
        and (aligned or not line.aligned)
        and (card.capability == 90 or not line.hopper)
        and count * -(-rows // line.rows) * -(-cols // line.cols)
        >= line.fills * card.multiprocessors
    )
