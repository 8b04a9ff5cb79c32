"""Triton kernels around the backward pass of warp groups on Hopper: what it reads, and the rounding
of what it wrote.

    delta_i = sum_d do_id o_id - dlse_i    lse_i = r_i - log2(1 / l_i)

r_i and 1 / l_i are the reference of a row and the inverse of its sum, as the forward pass had them;
o is taken as it was before its rounding, as far as o and o_low know.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import length_of, load_from_pointer, store_rows
from .tiles_forward import sink_of
from .tiles_rounding import load_unrounded

# Queries of a tile.
QUERIES = tl.constexpr(64)


@triton.jit(do_not_specialize=("ranges",))
def prepare_kernel(
    do_ptr,
    o_ptr,
    o_low_ptr,
    softmax_ptr,
    dlse_ptr,
    sinks_ptr,
    lse_ptr,
    delta_ptr,
    counters_ptr,
    dsinks_ptr,
    do_batch_stride,
    do_row_stride,
    do_head_stride,
    queries,
    heads,
    group,
    rows,
    query_tiles,
    blocks,
    ranges,
    CONFIG: tl.constexpr,
):
    """One program computes -lse and delta of a tile of queries of one head, each in the order in
    which the lanes of a warp read them, and sets the counters of its block to zero. ``blocks`` are
    those of the queries of the ``group`` heads that share keys. The tile's part of dsink is that of
    delta as it is.
    """
    head = tl.program_id(0) // query_tiles
    tile = tl.program_id(0) % query_tiles
    batch, of_head, first = head // heads, head % heads, tile * QUERIES
    do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, of_head, queries
    do = load_from_pointer(do_source, first, queries, QUERIES, True, CONFIG).to(tl.float32)
    place = batch, of_head, first, queries, heads
    o = load_unrounded(o_ptr, o_low_ptr, place, QUERIES, CONFIG.D, CONFIG.BLOCK_D)
    delta = tl.sum(do * o, 1)
    number = tl.arange(0, QUERIES)
    row = first + number
    at = head.to(tl.int64) * queries + row
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=row < queries, other=0.0)
    # The probabilities of rows past the last are 2^-inf.
    reference = tl.load(softmax_ptr + at, mask=row < queries, other=float("inf"))
    inverse_sum = tl.load(softmax_ptr + rows + at, mask=row < queries, other=1.0)
    # A lane has columns 8 j + 2 l and 8 j + 2 l + 1 of a tile of scores, for l a number of its own.
    place = number % 8 // 2 * 16 + number // 8 * 2 + number % 2
    at_place = (head.to(tl.int64) * query_tiles + tile) * QUERIES + place
    tl.store(lse_ptr + at_place, tl.log2(inverse_sum) - reference)
    tl.store(delta_ptr + at_place, delta)
    if sinks_ptr is not None:
        p = tl.exp2(sink_of(sinks_ptr, of_head) - reference) * inverse_sum
        part = batch * query_tiles + tile
        tl.store(dsinks_ptr + part.to(tl.int64) * heads + of_head, -tl.sum(p * delta, 0))
    of_keys = head // group
    tile += head % group * query_tiles
    if tile % CONFIG.TILES == 0:
        for stripe in range(of_keys * ranges, (of_keys + 1) * ranges):
            tl.store(counters_ptr + stripe * blocks + tile // CONFIG.TILES, 0)


@triton.jit(do_not_specialize=("ranges",))
def round_dq_kernel(
    sum_ptr,
    key_lengths_ptr,
    dq_ptr,
    scale,
    queries,
    keys,
    heads,
    group,
    query_tiles,
    key_tiles,
    ranges,
    CONFIG: tl.constexpr,
):
    """One program rounds a tile of dq of one head, from the order of the registers that wrote it,
    once it has added those of the head's ranges that have keys, ``key_tiles`` tiles each, in their
    order.
    """
    D: tl.constexpr = CONFIG.D
    head = tl.program_id(0) // query_tiles
    tile = tl.program_id(0) % query_tiles
    of_tile = sum_ptr + tl.arange(0, QUERIES * D)
    # The tiles of a stripe are those of all heads that share its keys.
    of_stripe = tl.cast(group * query_tiles, tl.int64)
    tile_of_stripe = head % group * query_tiles + tile
    at = ((head // group).to(tl.int64) * ranges * of_stripe + tile_of_stripe) * (QUERIES * D)
    if key_lengths_ptr is None:
        x = tl.load(of_tile + at)
    else:
        length = length_of(key_lengths_ptr, head // heads, keys)
        ranges = tl.cdiv(tl.cdiv(length, CONFIG.KEYS), key_tiles)
        x = tl.load(of_tile + at, mask=(ranges > 0) & (tl.arange(0, QUERIES * D) >= 0), other=0.0)
    for _ in range(1, ranges):
        at += of_stripe * (QUERIES * D)
        x += tl.load(of_tile + at)
    # Which numbers these are: 64 columns of D, of which a tile has 64 queries, transposed; j, the
    # warp, a lane's row, its columns, the half of rows, a column.
    x = tl.reshape(x, [D // 64, 8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 4, 6, 0, 2, 5, 3]), [QUERIES, D])
    place = head // heads, head % heads, tile * QUERIES, queries, heads
    store_rows(dq_ptr, x * scale, place, D)
