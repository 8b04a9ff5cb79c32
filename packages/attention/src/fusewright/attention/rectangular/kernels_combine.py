"""Triton kernels that add the parts of tiles that were cut, for Hopper: of tiles of queries, cut by
their keys, in the forward pass; of tiles of keys, cut by their queries, in the backward pass.

    m = max_part r    l = sum_part 2^(r - m) l_part    o = sum_part 2^(r - m) o_part / l

A sink is one score more, of no part. lse is of l before the rounding of probabilities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.kernels_hopper_forward import LARGEST_OUTPUT, LARGEST_SUM
from ..common.tiles import LOG_2, store_rows
from ..common.tiles_forward import add_sink, sink_of, store_outputs


@triton.jit
def combine_parts_kernel(
    partial_o_ptr,
    partial_softmax_ptr,
    flags_ptr,
    sinks_ptr,
    o_ptr,
    lse_ptr,
    softmax_ptr,
    o_low_ptr,
    whole,
    parts,
    query_tiles,
    queries,
    heads,
    rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program adds the parts of ROWS queries in their order, and flags those of which a part
    has to be computed again.
    """
    left = tl.num_programs(0) // GROUPS
    tile = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    head = (whole + tile) // query_tiles
    block = (whole + tile) % query_tiles * GROUPS + group
    row = tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(parts):
        number = (part * left + tile) * GROUPS + group
        m = tl.maximum(m, tl.load(partial_softmax_ptr + number * (3 * ROWS) + row))
    l = tl.zeros([ROWS], tl.float32)
    exact_l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    good = tl.full([ROWS], 1, tl.int32)
    for part in range(parts):
        number = (part * left + tile) * GROUPS + group
        rescale = tl.exp2(tl.load(partial_softmax_ptr + number * (3 * ROWS) + row) - m)
        total = tl.load(partial_softmax_ptr + number * (3 * ROWS) + ROWS + row)
        partial = tl.load(partial_o_ptr + number * (ROWS * D) + at)
        l += total * rescale
        if lse_ptr is not None:
            to_exact = partial_softmax_ptr + number * (3 * ROWS) + 2 * ROWS
            exact_l += tl.load(to_exact + row) * rescale
        o += partial * rescale[:, None]
        # Not above: NaN has to be flagged, too.
        inside = tl.min((tl.abs(partial) <= LARGEST_OUTPUT).to(tl.int32), 1)
        good = good & (total <= LARGEST_SUM).to(tl.int32) & inside
    # Parts that are finite may have a sum that is not.
    good = good & tl.min((tl.abs(o) <= LARGEST_OUTPUT).to(tl.int32), 1)
    if sinks_ptr is not None:
        sink = sink_of(sinks_ptr, head % heads)
        _, _, exact_l = add_sink(o, m, exact_l, sink)
        o, m, l = add_sink(o, m, l, sink)
    if block * ROWS < queries:
        flag = head * tl.cdiv(queries, ROWS) + block
        tl.store(flags_ptr + flag, 1 - tl.min(good, 0))
        of_tile = head // heads, head % heads, block * ROWS, queries, heads
        store_outputs(o, m, l, o_ptr, None, softmax_ptr, o_low_ptr, of_tile, rows, D)
        if lse_ptr is not None:
            query = block * ROWS + row
            lse = (m + tl.log2(exact_l)) * LOG_2
            tl.store(lse_ptr + head.to(tl.int64) * queries + query, lse, mask=query < queries)


@triton.jit(do_not_specialize=("ranges",))
def add_parts_kernel(
    partial_ptr,
    dk_ptr,
    dv_ptr,
    whole,
    parts,
    keys,
    heads,
    key_tiles,
    ranges,
    CONFIG: tl.constexpr,
):
    """One program adds the parts of dk, or of dv, of ROWS keys in their order."""
    rows_of_tile: tl.constexpr = CONFIG.KEYS // CONFIG.ROWS
    tile = tl.program_id(0) // (2 * rows_of_tile)
    is_dv = tl.program_id(0) // rows_of_tile % 2
    first = tl.program_id(0) % rows_of_tile * CONFIG.ROWS
    column = (whole + tile) // CONFIG.STRIPES
    stripe = column // key_tiles * CONFIG.STRIPES + (whole + tile) % CONFIG.STRIPES
    head, key_tile = stripe // ranges, stripe % ranges * key_tiles + column % key_tiles
    at = (first + tl.arange(0, CONFIG.ROWS))[:, None] * CONFIG.D + tl.arange(0, CONFIG.D)[None, :]
    total = tl.full([CONFIG.ROWS, CONFIG.D], 0.0, tl.float32)
    for part in range(parts):
        number = (tile * parts + part) * 2 + is_dv
        total += tl.load(partial_ptr + number * (CONFIG.KEYS * CONFIG.D) + at)
    place = head // heads, head % heads, key_tile * CONFIG.KEYS + first, keys, heads
    if is_dv == 0:
        store_rows(dk_ptr, total, place, CONFIG.D)
    else:
        store_rows(dv_ptr, total, place, CONFIG.D)
