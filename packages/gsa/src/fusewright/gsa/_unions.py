"""The launches of tiles over unions of selections: bits, lists, and what both passes share.

Queries are taken in stretches, so that the bits and lists of a long sequence stay small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._backends import interpreted
from ._configs import (
    KEYS_OF_TILES,
    MEMBERS,
    MEMBERS_AT_A_TIME,
    QUERIES_OF_TILES,
    ListConfig,
    UnionConfig,
    block_width,
)
from ._indexer_problem import Shape, grid_of
from ._launch import Launch
from ._members_kernels import _keys_of_tiles_kernel, _members_kernel, _queries_of_tiles_kernel
from ._sparse_problem import Sparse

Tensor = torch.Tensor
WORD_BITS = 32
# Rows of bits have whole tiles of keys, of which none is longer.
LONGEST_TILE = 128


class Members(NamedTuple):
    """The launch that sets the bits of ``part`` queries from ``first`` on, and their shape:
    ``[B, R, part, words]``.
    """

    launch: Launch
    shape: Shape
    first: int
    part: int

    def of(self, indices: Tensor, count: Tensor | None) -> Tensor:
        """A bit for each query and key, in words of 32 along the keys."""
        found = torch.zeros(self.shape, dtype=torch.int32, device=indices.device)
        self.launch((indices, count, found))
        return found


class Tiles(NamedTuple):
    """The launch that lists what each of ``lists`` tiles needs, in ``capacity`` slots, and the one
    that multiplies the tiles.
    """

    listing: Launch
    launch: Launch
    lists: int
    words: int
    capacity: int

    def of(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Names ``[lists, capacity]``, their members' bits ``[lists, words, capacity]``, and how
        many names there are ``[lists]``.
        """
        sizes = ((self.lists, self.capacity), (self.lists, self.words, self.capacity))
        names, bits, lengths = (
            torch.empty(size, dtype=torch.int32, device=members.device)
            for size in (*sizes, (self.lists,))
        )
        self.listing((members, names, bits, lengths))
        return names, bits, lengths


def stretches(sparse: Sparse, tile: int) -> list[tuple[int, int]]:
    """First query and number of queries of each stretch, in whole tiles of queries but the last."""
    rows = sparse.batches * sparse.selections * sparse.keys
    most = max(MEMBERS_AT_A_TIME // max(rows, 1) // tile, 1) * tile
    return [(first, min(most, sparse.queries - first)) for first in range(0, sparse.queries, most)]


def plan_members(sparse: Sparse, first: int, part: int) -> Members:
    words = -(-sparse.keys // LONGEST_TILE) * LONGEST_TILE // WORD_BITS
    sizes = (first, part, sparse.keys, sparse.selections, sparse.slots, words)
    launch = Launch(
        _members_kernel,
        grid_of(sparse.batches * sparse.selections * part),
        sparse.device,
        (*sparse.selection_strides, *sizes),
        dict(num_warps=MEMBERS.num_warps),
        HAS_COUNT=sparse.has_count,
        BLOCK=MEMBERS.block,
    )
    return Members(launch, (sparse.batches, sparse.selections, part, words), first, part)


def tile_queries(sparse: Sparse, config: UnionConfig) -> int:
    """How many queries the rows of a tile are."""
    return max(config.rows // config.stacked(sparse.rows), 1)


def plan_queries_tiles(
    kernel: Any, sparse: Sparse, config: UnionConfig, members: Members, **constants: Any
) -> Tiles:
    """Tiles of the queries that ``members`` are of: the keys of each, and a kernel over them."""
    tile = tile_queries(sparse, config)
    stack = config.stacked(sparse.rows)
    tiles = -(-members.part // tile)
    lists = sparse.batches * sparse.selections * tiles
    capacity = whole(min(sparse.keys, tile * sparse.slots), config.columns)
    words = words_of(tile)
    listing = plan_list(
        *(_keys_of_tiles_kernel, sparse, KEYS_OF_TILES, lists),
        (members.part, sparse.keys, members.shape[-1], tiles, capacity),
        dict(TILE=tile, WORDS=words, FILL=config.columns),
    )
    launch = Launch(
        kernel,
        grid_of(sparse.batches * (sparse.heads // stack) * tiles),
        sparse.device,
        (
            *(*sparse.strides, members.first, sparse.queries, sparse.heads),
            *(sparse.heads // sparse.key_heads, sparse.selections, tiles, capacity),
            sparse.score_rows,
        ),
        dict(num_warps=config.num_warps),
        D=sparse.width,
        **constants,
        **shared_constants(sparse, config, stack, tile),
        BLOCK_K=config.columns,
        BLOCK_D=block_width(sparse.width),
        NUM_STAGES=config.num_stages,
    )
    return Tiles(listing, launch, lists, words, capacity)


def plan_keys_tiles(
    kernel: Any, sparse: Sparse, config: UnionConfig, members: Members, **constants: Any
) -> Tiles:
    """Tiles of keys: which of the queries that ``members`` are of have selected any, and a kernel
    over them.
    """
    tile, stack = config.rows, config.stacked(sparse.rows)
    queries = max(config.columns // stack, 1)
    tiles = -(-sparse.keys // tile)
    lists = sparse.batches * sparse.selections * tiles
    capacity = whole(members.part, queries)
    words = words_of(tile)
    listing = plan_list(
        *(_queries_of_tiles_kernel, sparse, QUERIES_OF_TILES, lists),
        (members.first, members.part, members.shape[-1], tiles, capacity),
        dict(TILE=tile, WORDS=words, FILL=queries),
    )
    launch = Launch(
        kernel,
        grid_of(sparse.batches * sparse.key_heads * tiles),
        sparse.device,
        (
            *(*sparse.strides, sparse.queries, sparse.keys, sparse.heads),
            *(sparse.heads // sparse.key_heads, sparse.selections, tiles, capacity),
            sparse.score_rows,
        ),
        dict(num_warps=config.num_warps),
        D=sparse.width,
        **constants,
        **shared_constants(sparse, config, stack, tile),
        BLOCK_Q=queries,
        BLOCK_D=block_width(sparse.width),
        NUM_STAGES=config.num_stages,
    )
    return Tiles(listing, launch, lists, words, capacity)


def plan_list(
    kernel: Any,
    sparse: Sparse,
    config: ListConfig,
    lists: int,
    integers: tuple[int, ...],
    constants: dict[str, int],
) -> Launch:
    """The launch that makes the list of one tile a program."""
    return Launch(
        kernel,
        grid_of(lists),
        sparse.device,
        integers,
        dict(num_warps=config.num_warps),
        **constants,
        BLOCK=config.block,
    )


def shared_constants(sparse: Sparse, config: UnionConfig, stack: int, tile: int) -> dict[str, Any]:
    """What every kernel of tiles is told."""
    return dict(
        UPCAST=interpreted(),
        PRECISION=sparse.precision,
        STACK=stack,
        TILE=tile,
        WORDS=words_of(tile),
    )


def words_of(tile: int) -> int:
    """How many words the bits of so many members take."""
    return -(-tile // WORD_BITS)


def whole(number: int, block: int) -> int:
    """The lowest multiple of ``block``, and of what a card reads at once, that is not below."""
    block = max(block, WORD_BITS)
    return -(-number // block) * block
