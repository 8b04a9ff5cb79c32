"""The launches of tiles over unions of selections: bits, lists, and what both passes have in
common.

Queries are taken in chunks, so that the bits and lists of a long sequence stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import Launch, cdiv
from .._core.lazy import lazy_module
from .._core.precision import round_up
from ..common.launches import SMALLEST_TILE, Shape, grid_of
from .launch_problem import ALL_REGISTERS, SparseProblem, UnionConfig
from .launch_segments import Segments, plan_segments

if TYPE_CHECKING:
    from . import kernels_members
else:
    kernels_members = lazy_module(__package__, "kernels_members")

Tensor = torch.Tensor
WORD_BITS = 32
# Rows of bits have whole tiles of keys, of which none is longer.
LONGEST_TILE = 128


class ListConfig(NamedTuple):
    """One program lists what one tile needs, ``block`` candidates at a time; keys of more than 32
    queries, which are several words each, so many words at a time.
    """

    block: int
    num_warps: int


class ListConstants(NamedTuple):
    """What a kernel of lists is compiled for, read as ``CONFIG``: lists go on to whole FILLs, and
    one program looks for AT_A_TIME keys.
    """

    TILE: int
    WORDS: int
    FILL: int
    BLOCK: int
    AT_A_TIME: int = 0


# Source: docs/decisions/0014-tiles-h200.csv and 0014-lists-h200.csv.
MEMBERS = ListConfig(block=512, num_warps=4)
KEYS_OF_TILES = ListConfig(block=1024, num_warps=8)
QUERIES_OF_TILES = ListConfig(block=1024, num_warps=4)
# Keys that one program lists, and words of a union that one computes. Unmeasured.
KEYS_AT_A_TIME = 2048
WORDS_AT_A_TIME = 128
# Bits for this many pairs of a query and a key are held at a time, 128 MiB of bits, and lists with
# them: no more than five times the int32 indices of these queries, or four times the bits.
MEMBERS_AT_A_TIME = 1 << 30


class Members(NamedTuple):
    """The launch that sets the bits of ``part`` queries from ``first`` on, and their shape:
    ``[B, R, part, words]``.
    """

    launch: Launch
    shape: Shape
    first: int
    part: int
    # Where the marks stand, behind the bits: one for all queries, and one for each; and where they
    # end.
    marks: int
    end: int

    def of(self, indices: Tensor, count: Tensor | None) -> Tensor:
        """A bit for each query and key, in words of 32 along the keys, and behind these the marks
        of queries that name a key again.
        """
        members = torch.zeros(self.end, dtype=torch.int32, device=indices.device)
        self.launch((indices, count, members))
        return members


class Tiles(NamedTuple):
    """The launch that lists what each of ``lists`` tiles needs, in ``capacity`` slots, the one that
    multiplies the tiles, and the one that does what marked queries need: nothing without any; how
    lists are cut, None where they are not; and the launch that computes the unions that lists of
    keys are made from, of so many words.
    """

    listing: Launch
    launch: Launch
    again: Launch | None
    lists: int
    words: int
    capacity: int
    segments: Segments | None = None
    unions: Launch | None = None
    union_words: int = 0

    def of(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Names ``[lists, capacity]``, their members' bits ``[lists, words, capacity]``, and how
        many names there are ``[lists]``.
        """
        shapes = (
            (self.lists, self.capacity),
            (self.lists, self.words, self.capacity),
            (self.lists,),
        )
        names, bits, lengths = (
            torch.empty(shape, dtype=torch.int32, device=members.device) for shape in shapes
        )
        if self.unions is None:
            self.listing((members, names, bits, lengths))
        else:
            union = members.new_empty((self.lists, self.union_words))
            self.unions((members, union))
            self.listing((members, union, names, bits, lengths))
        return names, bits, lengths


def chunks_of_queries(problem: SparseProblem, tile: int) -> list[tuple[int, int]]:
    """First query and number of queries of each chunk, in whole tiles of queries but the last."""
    bits = problem.batches * problem.selections * problem.keys
    most = max(MEMBERS_AT_A_TIME // max(bits, 1) // tile, 1) * tile
    return [
        (first, min(most, problem.queries - first)) for first in range(0, problem.queries, most)
    ]


def plan_members(problem: SparseProblem, first: int, part: int) -> Members:
    """The bits of ``part`` queries from ``first`` on."""
    sizes = (problem.batches, problem.selections, problem.keys, problem.slots)
    return members_of(*sizes, problem.selection_strides, problem.device, first, part)


def members_of(
    batches: int,
    selections: int,
    keys: int,
    slots: int,
    strides: tuple[int, ...],
    device: torch.device,
    first: int,
    part: int,
) -> Members:
    """The bits of ``part`` queries from ``first`` on; ``strides``: of sequences, heads and queries,
    of indices and of count.
    """
    words = round_up(keys, LONGEST_TILE) // WORD_BITS
    launch = Launch(
        kernels_members.members_kernel,
        grid_of(batches * selections * part),
        device,
        (*strides, first, part, keys, selections, slots, words),
        dict(num_warps=MEMBERS.num_warps),
        BLOCK=MEMBERS.block,
    )
    queries = batches * selections * part
    marks = queries * words
    shape = (batches, selections, part, words)
    return Members(launch, shape, first, part, marks, marks + 1 + queries)


def tile_queries(problem: SparseProblem, config: UnionConfig) -> int:
    """How many queries the rows of a tile are."""
    return max(config.rows // config.stacked(problem.rows), 1)


def plan_tiles(
    kernel: Any,
    problem: SparseProblem,
    config: UnionConfig,
    members: Members,
    of_keys: bool = False,
    adds: bool = False,
) -> Tiles:
    """Tiles of the queries that ``members`` are of and the keys that any of a tile has selected, or
    tiles of keys and those of these queries that have selected any; and a kernel over them. What
    marked queries need beside tiles of queries is ``plan_marked``'s.
    """
    stack = config.stacked(problem.rows)
    if of_keys:
        tile, block = config.rows, max(config.columns // stack, 1)
        tiles, entries = cdiv(problem.keys, tile), members.part
        listing, line = kernels_members.queries_of_tiles_kernel, QUERIES_OF_TILES
        listed, sizes = (members.first, members.part), (problem.queries, problem.keys)
        programs = problem.batches * problem.key_heads * tiles
    else:
        tile, block = tile_queries(problem, config), config.columns
        tiles, entries = cdiv(members.part, tile), min(problem.keys, tile * problem.slots)
        listing, line = kernels_members.keys_of_tiles_kernel, KEYS_OF_TILES
        listed, sizes = (members.part, problem.keys), (members.first, problem.queries)
        programs = problem.batches * (problem.heads // stack) * tiles
    lists = problem.batches * problem.selections * tiles
    # Whole blocks of columns, and whole reads of the GPU.
    capacity, words = round_up(entries, max(block, WORD_BITS)), cdiv(tile, WORD_BITS)
    block_names = line.block if of_keys else line.block // words
    stretch = 0 if of_keys else max(KEYS_AT_A_TIME, block_names)
    union_words = members.shape[-1]
    listing_launch = Launch(
        listing,
        grid_of(lists if of_keys else lists * cdiv(problem.keys, stretch)),
        problem.device,
        (*listed, union_words, tiles, capacity),
        dict(num_warps=line.num_warps),
        CONFIG=ListConstants(tile, words, block, block_names, stretch),
    )
    heads = (problem.heads, problem.heads // problem.key_heads, problem.selections)
    integers: tuple[int, ...] = (*sizes, *heads, tiles, capacity, problem.score_rows)
    constants = dict(HEADS=stack, BLOCK=block, TILE=tile, WORDS=words, ADDS=adds)
    again = segments = None
    if of_keys:
        of_bits = (members.first, members.part, problem.slots, members.marks)
        integers = (*problem.selection_strides, *of_bits, *integers)
        segments = plan_segments(problem, config, members.part, tile, adds)
        # Narrow and spread over more warps: both ways through the queries take registers.
        narrow = config._replace(num_stages=1, num_warps=8)
        constants_again = constants | dict(BLOCK=max(SMALLEST_TILE // stack, 1), AGAIN=True)
        whole = (*integers, 0, 0)
        again = problem.launch(kernel, narrow, programs, whole, ALL_REGISTERS, **constants_again)
        if segments is None:
            integers = whole
        else:
            programs = problem.batches * problem.key_heads * segments.most
            integers = (*integers, segments.most, segments.most_parts)
        constants["TRANSPOSED"] = config.transposed
    launch = problem.launch(kernel, config, programs, integers, **constants)
    made = Tiles(listing_launch, launch, again, lists, words, capacity, segments)
    if of_keys:
        return made
    unions = Launch(
        kernels_members.unions_kernel,
        grid_of(lists * cdiv(union_words, WORDS_AT_A_TIME)),
        problem.device,
        (members.part, union_words, tiles),
        dict(num_warps=1),
        TILE=tile,
        BLOCK=WORDS_AT_A_TIME,
    )
    return made._replace(unions=unions, union_words=union_words)
