"""Triton kernels of the backward pass of sliding-window attention: as the streaming ones, but tiles
of queries and of keys are multiplied only where a row sees a key, and are of one document each.

    p = exp(s - m) / l,  ds = p * (do v^T - delta),  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

All rows see the keys of the prefix. One program for these keys would still run when all others are
done, so their queries are cut into chunks, whose partial sums of dk and dv are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, load_rows, store_rows
from ..common.tiles_backward import (
    add_keys,
    add_queries,
    excess_of_sink,
    finished_dq,
    gradient_of_sink,
    load_queries,
    load_statistics,
    score_gradients,
    statistics_of,
    transposed_probabilities,
)
from .tiles import (
    COUNTS,
    border_keys,
    count_tiles,
    first_row_of,
    inner_keys,
    keys_of_rows,
    queries_before,
    queries_of_chunk,
    rows_of_keys,
    rows_of_tile,
    sees,
)


@triton.jit(do_not_specialize=COUNTS)
def window_dq_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dlse_ptr,
    bounds_ptr,
    sinks_ptr,
    o_ptr,
    o_low_ptr,
    softmax_ptr,
    delta_ptr,
    dq_ptr,
    dsinks_ptr,
    scale,
    do_batch_stride,
    do_row_stride,
    do_head_stride,
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
    """One program computes delta and dq of BLOCK_Q rows of one head, and what they add to its
    dsink; the last rows start first.
    """
    WITH_SINK: tl.constexpr = sinks_ptr is not None
    PACKED: tl.constexpr = bounds_ptr is not None
    tiles = count_tiles(queries, bounds_ptr, documents, CONFIG.BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    tile = tiles - 1 - tl.program_id(0) % tiles
    sequence = bounds_ptr, documents, batch, prefix, keys
    offset = first_row_of(queries, keys, every)
    first, last, seeing, begin, end = rows_of_tile(
        tile, queries, sequence, offset, every, CONFIG.BLOCK_Q
    )
    do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    of_keys = head // group
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    factor = scale * LOG2_E
    MASKED: tl.constexpr = PACKED or not CONFIG.DESCRIPTORS
    do = load_rows(do_source, first, seeing, CONFIG.BLOCK_Q, MASKED, CONFIG, True)
    of_tile = batch, head, first, queries, heads
    m, inverse_sum, delta, dlse, at, inside = load_statistics(
        do, o_ptr, o_low_ptr, dlse_ptr, softmax_ptr, delta_ptr, of_tile, rows, CONFIG, seeing
    )
    q = load_rows(q_source, first, seeing, CONFIG.BLOCK_Q, MASKED, CONFIG)
    first_row = offset + first * every
    last_row = tl.minimum(first_row + (CONFIG.BLOCK_Q - 1) * every, end - 1)
    row = first_row + tl.arange(0, CONFIG.BLOCK_Q) * every
    border, inner, place = keys_of_rows(first_row, last_row, window, prefix, begin, CONFIG.BLOCK_K)
    if PACKED:
        border = tl.where(first < seeing, border, 0)
        inner = tl.where(first < seeing, inner, 0)

    dq = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_D], 0.0, tl.float32)
    pk = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_D], 0.0, tl.float32)
    excess = tl.full([CONFIG.BLOCK_Q], 0.0, tl.float32)
    if sinks_ptr is not None:
        excess += excess_of_sink(delta, m, inverse_sum, sinks_ptr, head, q.dtype)
    for number in tl.range(0, border, num_stages=CONFIG.NUM_STAGES):
        start, limit, distances = border_keys(
            number, place, window, prefix, end, keys, CONFIG.BLOCK_K
        )
        k = load_rows(k_source, start, limit, CONFIG.BLOCK_K, True, CONFIG)
        v = load_rows(v_source, start, limit, CONFIG.BLOCK_K, True, CONFIG, True)
        p, ds = score_gradients(q, k, v, do, m, inverse_sum, delta, factor, CONFIG)
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        seen = sees(row[:, None], key[None, :], distances) & (key < limit)[None, :]
        p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
        dq, pk, excess = add_keys(dq, pk, excess, p, ds, k, CONFIG, WITH_SINK)
    for number in tl.range(0, inner, num_stages=CONFIG.NUM_STAGES):
        start = inner_keys(number, place, CONFIG.BLOCK_K)
        k = load_rows(k_source, start, keys, CONFIG.BLOCK_K, False, CONFIG)
        v = load_rows(v_source, start, keys, CONFIG.BLOCK_K, False, CONFIG, True)
        p, ds = score_gradients(q, k, v, do, m, inverse_sum, delta, factor, CONFIG)
        dq, pk, excess = add_keys(dq, pk, excess, p, ds, k, CONFIG, WITH_SINK)
    if WITH_SINK:
        dsink = gradient_of_sink(
            excess, m, inverse_sum, delta, dlse, inside, sinks_ptr, head, q.dtype
        )
        part = batch * tiles + tl.program_id(0) % tiles
        tl.store(dsinks_ptr + part.to(tl.int64) * heads + head, dsink)
    dq = finished_dq(
        dq, pk, excess, inverse_sum, delta, dlse, scale, delta_ptr, at, inside, q.dtype
    )
    store_rows(dq_ptr, dq, of_tile, CONFIG.D, last)


@triton.jit(do_not_specialize=COUNTS)
def window_dkdv_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    bounds_ptr,
    softmax_ptr,
    delta_ptr,
    dk_partial_ptr,
    dv_partial_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    do_batch_stride,
    do_row_stride,
    do_head_stride,
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
    batches,
    chunk_rows,
    CONFIG: tl.constexpr,
):
    """One program computes dk and dv of BLOCK_K keys of the band of one head, over the queries of
    each head that reads them; or, for as many keys of the prefix, the partial sums of chunk_rows
    queries. These come first: they may take longer. Without a prefix nothing is written to the
    partial sums.
    """
    PACKED: tl.constexpr = bounds_ptr is not None
    key_heads = heads // group
    chunks = tl.cdiv(queries, chunk_rows)
    prefix_parts = tl.cdiv(prefix, CONFIG.BLOCK_K) * chunks
    of_prefix = tl.program_id(0) < prefix_parts * batches * key_heads
    program = tl.program_id(0) - tl.where(of_prefix, 0, prefix_parts * batches * key_heads)
    key_tiles = count_tiles(keys - prefix, bounds_ptr, documents, CONFIG.BLOCK_K)
    parts = tl.where(of_prefix, prefix_parts, key_tiles)
    batch = program // parts // key_heads
    of_keys = program // parts % key_heads
    part = program % parts
    chunk = part % chunks
    sequence = bounds_ptr, documents, batch, prefix, keys
    offset = first_row_of(queries, keys, every)
    in_band, band_limit, seen, _, end = rows_of_tile(
        part, keys - prefix, sequence, prefix, 1, CONFIG.BLOCK_K
    )
    first = tl.where(of_prefix, part // chunks * CONFIG.BLOCK_K, prefix + in_band)
    limit = tl.where(of_prefix, prefix, prefix + band_limit)
    # The end of the keys that some query sees, and of the queries that see keys of the band.
    seen = tl.where(of_prefix, prefix, prefix + seen)
    last = queries
    if PACKED:
        last = queries_before(end, offset, every)
    start, before, inner, tiles = rows_of_keys(
        first, window, offset, every, last, CONFIG.BLOCK_K, CONFIG.BLOCK_Q
    )
    chunk_start = chunk * chunk_rows
    chunk_end = tl.minimum(chunk_start + chunk_rows, queries)
    of_chunk, ends = queries_of_chunk(
        chunk_start, chunk_end, sequence, offset, every, CONFIG.BLOCK_Q
    )
    if PACKED:
        before = tl.where(first < seen, before, 0)
        inner = tl.where(first < seen, inner, 0)
        tiles = tl.where(first < seen, tiles, 0)
        earlier = tl.where(of_prefix, ends[0], last)
        last = tl.where(of_prefix, ends[1], last)
        gap = tl.where(of_prefix, ends[2], 0)
    start = tl.where(of_prefix, of_chunk[0], start)
    before = tl.where(of_prefix, of_chunk[1], before)
    inner = tl.where(of_prefix, of_chunk[2], inner)
    tiles = tl.where(of_prefix, of_chunk[3], tiles)
    distances = tl.where(of_prefix, -keys, 0), tl.where(of_prefix, keys, window)
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    factor = scale * LOG2_E
    k = load_rows(k_source, first, seen, CONFIG.BLOCK_K, True, CONFIG)
    v = load_rows(v_source, first, seen, CONFIG.BLOCK_K, True, CONFIG, True)
    key = first + tl.arange(0, CONFIG.BLOCK_K)
    dk = tl.full([CONFIG.BLOCK_K, CONFIG.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([CONFIG.BLOCK_K, CONFIG.BLOCK_V], 0.0, tl.float32)
    for member in range(group):
        head = of_keys * group + member
        do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
        q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
        statistics = statistics_of(softmax_ptr, delta_ptr, batch, head, queries, heads, rows)
        for number in tl.range(0, tiles - inner, num_stages=CONFIG.NUM_STAGES):
            at = start + (number + tl.where(number < before, 0, inner)) * CONFIG.BLOCK_Q
            query_limit = last
            if PACKED:
                at += tl.where(number < before, 0, gap)
                query_limit = tl.where(number < before, earlier, last)
            q, do, m, inverse_sum, delta = load_queries(
                q_source, do_source, statistics, at, query_limit, True, CONFIG
            )
            p = transposed_probabilities(k, q, m, inverse_sum, factor, CONFIG)
            row = offset + (at + tl.arange(0, CONFIG.BLOCK_Q)) * every
            p = tl.where(sees(row[None, :], key[:, None], distances), p, 0.0)
            dk, dv = add_queries(dk, dv, p, v, q, do, delta, CONFIG)
        begin = start + before * CONFIG.BLOCK_Q
        if PACKED:
            begin += gap
        for at in tl.range(
            begin, begin + inner * CONFIG.BLOCK_Q, CONFIG.BLOCK_Q, num_stages=CONFIG.NUM_STAGES
        ):
            q, do, m, inverse_sum, delta = load_queries(
                q_source, do_source, statistics, at, queries, False, CONFIG
            )
            p = transposed_probabilities(k, q, m, inverse_sum, factor, CONFIG)
            dk, dv = add_queries(dk, dv, p, v, q, do, delta, CONFIG)
    dk = dk * scale
    if of_prefix:
        task = chunk * batches + batch
        store_rows(dk_partial_ptr, dk, (task, of_keys, first, prefix, key_heads), CONFIG.D)
        store_rows(dv_partial_ptr, dv, (task, of_keys, first, prefix, key_heads), CONFIG.DV)
    else:
        store_rows(dk_ptr, dk, (batch, of_keys, first, keys, key_heads), CONFIG.D, limit)
        store_rows(dv_ptr, dv, (batch, of_keys, first, keys, key_heads), CONFIG.DV, limit)
