"""Triton kernels of long lists of queries: a list that many queries are on, such as that of the
first keys, which every query has selected, is cut into segments, which several programs go through.
What these give of dk and dv is added afterwards, in the order of the segments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import zeros


@triton.jit
def segments_kernel(
    length_ptr,
    cut_ptr,
    tiles,
    segments,
    target,
    shortest,
    BLOCK: tl.constexpr,
):
    """One program cuts the lists of one selection's tiles. A row of ``cut`` holds how many entries
    a segment has; the tile of each of ``segments`` segments, -1 for those that are none; the first
    segment of each tile, and where the last one's end; and the first of each tile's partial sums,
    -1 for a tile of one segment, which has none.
    """
    length_at = length_ptr + tl.program_id(0).to(tl.int64) * tiles
    cut_at = cut_ptr + tl.program_id(0).to(tl.int64) * (segments + 2 * tiles + 2)
    tile_at = cut_at + 1
    begin_at = tile_at + segments
    part_at = begin_at + tiles + 1
    total = 0
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(length_at + tile, mask=tile < tiles, other=0), 0)
    # Whole numbers of the shortest, of which as many as are aimed at hold all entries.
    size = tl.maximum(tl.cdiv(tl.cdiv(total, target), shortest), 1) * shortest
    tl.store(cut_at, size)
    begin, part = 0, 0
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        length = tl.load(length_at + tile, mask=tile < tiles, other=0)
        # An empty list has a segment too, which writes zeros.
        count = tl.where(tile < tiles, tl.maximum(tl.cdiv(length, size), 1), 0)
        parts = tl.where(count > 1, count, 0)
        first = begin + tl.cumsum(count, 0) - count
        first_part = part + tl.cumsum(parts, 0) - parts
        tl.store(begin_at + tile, first, mask=tile < tiles)
        tl.store(part_at + tile, tl.where(count > 1, first_part, -1), mask=tile < tiles)
        for number in range(0, tl.max(count, 0)):
            tl.store(tile_at + first + number, tile, mask=number < count)
        begin += tl.sum(count, 0)
        part += tl.sum(parts, 0)
    tl.store(begin_at + tiles, begin)
    for start in range(begin, segments, BLOCK):
        segment = start + tl.arange(0, BLOCK)
        tl.store(tile_at + segment, tl.zeros([BLOCK], tl.int32) - 1, mask=segment < segments)


@triton.jit
def segment_of(cut_at, segment, segments):
    """The tile of a segment, -1 for one that is none; the first of its entries, and behind which
    one it ends, or its list does.
    """
    size = tl.load(cut_at)
    tile = tl.load(cut_at + 1 + segment)
    begin = tl.load(cut_at + 1 + segments + tl.maximum(tile, 0))
    first = (segment - begin) * size
    return tile, first, first + size


@triton.jit
def partial_of(cut_at, segment, tile, tiles, segments):
    """The number of a segment's partial sum, -1 where it is its tile's only one."""
    begin_at = cut_at + 1 + segments + tile
    part = tl.load(begin_at + tiles + 1)
    return tl.where(part < 0, -1, part + segment - tl.load(begin_at))


@triton.jit
def add_segments_kernel(
    cut_ptr,
    parts_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    keys,
    key_heads,
    selections,
    tiles,
    segments,
    most_parts,
    TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One program adds the partial sums of dk and dv of a tile of several segments, for one head of
    keys, or ADDS them to what earlier queries gave.
    """
    tile = tl.program_id(0) % tiles
    key_head = (tl.program_id(0) // tiles % key_heads).to(tl.int64)
    batch = (tl.program_id(0) // tiles // key_heads).to(tl.int64)
    row = batch * selections + key_head % selections
    begin_at = cut_ptr + row * (segments + 2 * tiles + 2) + 1 + segments + tile
    part = tl.load(begin_at + tiles + 1)
    if part >= 0:
        last = part + tl.load(begin_at + 1) - tl.load(begin_at)
        place, col = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
        wide = (col < D)[None, :]
        within = (place * D)[:, None] + col[None, :]
        # Those of dv stand behind all of dk.
        first_part = (batch * key_heads + key_head) * most_parts
        to_dv = tl.num_programs(0).to(tl.int64) // tiles * most_parts * TILE * D
        dk = zeros(TILE, BLOCK_D)
        dv = zeros(TILE, BLOCK_D)
        for number in range(part, last):
            part_at = parts_ptr + (first_part + number) * TILE * D + within
            dk += tl.load(part_at, mask=wide, other=0.0)
            dv += tl.load(part_at + to_dv, mask=wide, other=0.0)
        key = (tile * TILE + place).to(tl.int64)
        inside = (key < keys)[:, None] & wide
        at = (((batch * keys + key) * key_heads + key_head) * D)[:, None] + col[None, :]
        dk = dk * scale
        if ADDS:
            dk += tl.load(dk_ptr + at, mask=inside, other=0.0)
            dv += tl.load(dv_ptr + at, mask=inside, other=0.0)
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
