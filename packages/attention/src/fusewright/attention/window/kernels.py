"""Triton kernel of the forward pass of sliding-window attention: as the streaming one, but a
program multiplies a tile of queries with the tiles of keys that its rows see, and no others.
Tiles of queries are of one document each.

    s_tj = scale q_t . k_j    p_tj = exp(s_tj - m_t)    l_t = sum_{j seen} p_tj
    o_t = sum_{j seen} p_tj v_j / l_t    lse_t = m_t + log l_t
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, LOWEST, load_rows, product
from ..common.tiles_forward import add_sink, next_softmax, sink_of, store_outputs
from .tiles import (
    COUNTS,
    border_keys,
    count_tiles,
    first_row_of,
    inner_keys,
    keys_of_rows,
    rows_of_tile,
    sees,
)


@triton.jit
def stream_keys(
    q,
    k_source,
    v_source,
    row,
    key_tiles,
    window,
    prefix,
    end,
    keys,
    factor,
    CAREFUL: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """The sum of values [BLOCK_Q, BLOCK_V], the maximum and the sum of each row [BLOCK_Q], over all
    tiles of keys that a tile of queries sees.

    Zero times NaN is NaN: a value in a border tile that is NaN or infinity would reach rows that do
    not see it. With ``CAREFUL`` it is left out there, and its key's scores are NaN instead: o is
    right, and the statistics are NaN too for the rows that see it.
    """
    border, inner, place = key_tiles
    # What is done a second time is rare: in one stage.
    stages: tl.constexpr = 1 if CAREFUL else CONFIG.NUM_STAGES
    m = tl.full([CONFIG.BLOCK_Q], LOWEST, tl.float32)
    l = tl.full([CONFIG.BLOCK_Q], 0.0, tl.float32)
    o = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_V], 0.0, tl.float32)
    for number in tl.range(0, border, num_stages=stages):
        start, limit, distances = border_keys(
            number, place, window, prefix, end, keys, CONFIG.BLOCK_K
        )
        k = load_rows(k_source, start, limit, CONFIG.BLOCK_K, True, CONFIG)
        v = load_rows(v_source, start, limit, CONFIG.BLOCK_K, True, CONFIG, True)
        s = product(q, tl.trans(k), CONFIG)
        if CAREFUL:
            zeros = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_V], 0.0, v.dtype)
            s += product(zeros, tl.trans(v), CONFIG)
            v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        seen = sees(row[:, None], key[None, :], distances) & (key < limit)[None, :]
        p, m, l, rescale = next_softmax(tl.where(seen, s, float("-inf")), m, l, factor)
        o = o * rescale[:, None] + product(p.to(v.dtype), v, CONFIG)
    for number in tl.range(0, inner, num_stages=stages):
        start = inner_keys(number, place, CONFIG.BLOCK_K)
        k = load_rows(k_source, start, keys, CONFIG.BLOCK_K, False, CONFIG)
        s = product(q, tl.trans(k), CONFIG)
        p, m, l, rescale = next_softmax(s, m, l, factor)
        v = load_rows(v_source, start, keys, CONFIG.BLOCK_K, False, CONFIG, True)
        o = o * rescale[:, None] + product(p.to(v.dtype), v, CONFIG)
    return o, m, l


@triton.jit
def attend(
    inputs,
    strides,
    bounds_ptr,
    sinks_ptr,
    outputs,
    scale,
    sizes,
    band,
    LAST_FIRST: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """The outputs of BLOCK_Q rows of one head, with ``LAST_FIRST`` those of the last rows by the
    first programs; ``inputs`` and ``strides`` are those of q, k and v.
    """
    q_ptr, k_ptr, v_ptr = inputs
    of_q, of_k, of_v = strides
    o_ptr, lse_ptr, softmax_ptr, o_low_ptr = outputs
    queries, keys, heads, group, rows = sizes
    window, prefix, every, documents = band
    PACKED: tl.constexpr = bounds_ptr is not None
    tiles = count_tiles(queries, bounds_ptr, documents, CONFIG.BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    tile = tl.program_id(0) % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    sequence = bounds_ptr, documents, batch, prefix, keys
    offset = first_row_of(queries, keys, every)
    first, last, seeing, begin, end = rows_of_tile(
        tile, queries, sequence, offset, every, CONFIG.BLOCK_Q
    )
    q_source = q_ptr, of_q[0], of_q[1], of_q[2], batch, head, queries
    of_keys = head // group
    k_source = k_ptr, of_k[0], of_k[1], of_k[2], batch, of_keys, keys
    v_source = v_ptr, of_v[0], of_v[1], of_v[2], batch, of_keys, keys
    factor = scale * LOG2_E
    q = load_rows(q_source, first, seeing, CONFIG.BLOCK_Q, PACKED or not CONFIG.DESCRIPTORS, CONFIG)
    first_row = offset + first * every
    last_row = tl.minimum(first_row + (CONFIG.BLOCK_Q - 1) * every, end - 1)
    row = first_row + tl.arange(0, CONFIG.BLOCK_Q) * every
    border, inner, place = keys_of_rows(first_row, last_row, window, prefix, begin, CONFIG.BLOCK_K)
    if PACKED:
        border = tl.where(first < seeing, border, 0)
        inner = tl.where(first < seeing, inner, 0)
    key_tiles = border, inner, place
    o, m, l = stream_keys(
        *(q, k_source, v_source, row, key_tiles, window, prefix, end, keys, factor),
        *(False, CONFIG),
    )
    # A second time with care, which costs time, only where something is NaN.
    if tl.max(tl.max((o != o).to(tl.int32), 1), 0) > 0:
        o, _, _ = stream_keys(
            *(q, k_source, v_source, row, key_tiles, window, prefix, end, keys, factor),
            *(True, CONFIG),
        )
    if sinks_ptr is not None:
        sink = sink_of(sinks_ptr, head)
        if PACKED:
            # Padding has none.
            sink = tl.where(first < seeing, sink, float("-inf"))
        o, m, l = add_sink(o, m, l, sink)
    of_tile = batch, head, first, queries, heads
    store_outputs(o, m, l, o_ptr, lse_ptr, softmax_ptr, o_low_ptr, of_tile, rows, CONFIG.DV, last)


@triton.jit(do_not_specialize=COUNTS)
def window_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bounds_ptr,
    sinks_ptr,
    o_ptr,
    lse_ptr,
    softmax_ptr,
    o_low_ptr,
    scale,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    k_head_stride,
    v_batch_stride,
    v_row_stride,
    v_head_stride,
    queries,
    keys,
    heads,
    group,
    window,
    prefix,
    every,
    documents,
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_Q rows of one head. The last rows start first: they see the most
    keys.
    """
    attend(
        (q_ptr, k_ptr, v_ptr),
        (
            (q_batch_stride, q_row_stride, q_head_stride),
            (k_batch_stride, k_row_stride, k_head_stride),
            (v_batch_stride, v_row_stride, v_head_stride),
        ),
        bounds_ptr,
        sinks_ptr,
        (o_ptr, lse_ptr, softmax_ptr, o_low_ptr),
        scale,
        (queries, keys, heads, group, rows),
        (window, prefix, every, documents),
        True,
        CONFIG,
    )


@triton.jit(do_not_specialize=COUNTS)
def flagged_window_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bounds_ptr,
    sinks_ptr,
    flags_ptr,
    o_ptr,
    lse_ptr,
    softmax_ptr,
    o_low_ptr,
    scale,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    k_head_stride,
    v_batch_stride,
    v_row_stride,
    v_head_stride,
    queries,
    keys,
    heads,
    group,
    window,
    prefix,
    every,
    documents,
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_Q rows of one head, where their flag is set."""
    if tl.load(flags_ptr + tl.program_id(0)) != 0:
        attend(
            (q_ptr, k_ptr, v_ptr),
            (
                (q_batch_stride, q_row_stride, q_head_stride),
                (k_batch_stride, k_row_stride, k_head_stride),
                (v_batch_stride, v_row_stride, v_head_stride),
            ),
            bounds_ptr,
            sinks_ptr,
            (o_ptr, lse_ptr, softmax_ptr, o_low_ptr),
            scale,
            (queries, keys, heads, group, rows),
            (window, prefix, every, documents),
            False,
            CONFIG,
        )
