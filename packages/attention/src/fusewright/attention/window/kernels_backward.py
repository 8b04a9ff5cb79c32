"""Triton kernels of the backward pass of sliding-window attention: as the streaming ones, but tiles
of queries and of keys are multiplied only where a row sees a key.

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
from .tiles import border_keys, first_row_of, inner_keys, keys_of_rows, rows_of_keys, sees


@triton.jit
def window_dq_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dlse_ptr,
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
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes delta and dq of BLOCK_Q rows of one head, and what they add to its
    dsink; the last rows start first.
    """
    WITH_SINK: tl.constexpr = sinks_ptr is not None
    tiles = tl.cdiv(queries, CONFIG.BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    first = (tiles - 1 - tl.program_id(0) % tiles) * CONFIG.BLOCK_Q
    do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    of_keys = head // group
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    factor = scale * LOG2_E
    do = load_rows(do_source, first, queries, CONFIG.BLOCK_Q, not CONFIG.DESCRIPTORS, CONFIG, True)
    of_tile = batch, head, first, queries, heads
    m, inverse_sum, delta, dlse, at, inside = load_statistics(
        do, o_ptr, o_low_ptr, dlse_ptr, softmax_ptr, delta_ptr, of_tile, rows, CONFIG
    )
    q = load_rows(q_source, first, queries, CONFIG.BLOCK_Q, not CONFIG.DESCRIPTORS, CONFIG)
    first_row = first_row_of(queries, keys, every) + first * every
    last_row = tl.minimum(first_row + (CONFIG.BLOCK_Q - 1) * every, keys - 1)
    row = first_row + tl.arange(0, CONFIG.BLOCK_Q) * every
    border, inner, place = keys_of_rows(first_row, last_row, window, prefix, CONFIG.BLOCK_K)

    dq = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_D], 0.0, tl.float32)
    pk = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_D], 0.0, tl.float32)
    excess = tl.full([CONFIG.BLOCK_Q], 0.0, tl.float32)
    if sinks_ptr is not None:
        excess += excess_of_sink(delta, m, inverse_sum, sinks_ptr, head, q.dtype)
    for number in tl.range(0, border, num_stages=CONFIG.NUM_STAGES):
        start, limit, distances = border_keys(number, place, window, prefix, keys, CONFIG.BLOCK_K)
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
    store_rows(dq_ptr, dq, of_tile, CONFIG.D)


@triton.jit
def window_dkdv_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
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
    key_heads = heads // group
    chunks = tl.cdiv(queries, chunk_rows)
    prefix_parts = tl.cdiv(prefix, CONFIG.BLOCK_K) * chunks
    of_prefix = tl.program_id(0) < prefix_parts * batches * key_heads
    program = tl.program_id(0) - tl.where(of_prefix, 0, prefix_parts * batches * key_heads)
    parts = tl.where(of_prefix, prefix_parts, tl.cdiv(keys - prefix, CONFIG.BLOCK_K))
    batch = program // parts // key_heads
    of_keys = program // parts % key_heads
    part = program % parts
    chunk = part % chunks
    first = tl.where(of_prefix, part // chunks * CONFIG.BLOCK_K, prefix + part * CONFIG.BLOCK_K)
    limit = tl.where(of_prefix, prefix, keys)
    offset = first_row_of(queries, keys, every)
    start, before, inner, tiles = rows_of_keys(
        first, window, offset, every, queries, CONFIG.BLOCK_K, CONFIG.BLOCK_Q
    )
    # All queries of the chunk see all keys of the prefix.
    length = tl.minimum(chunk_rows, queries - chunk * chunk_rows)
    start = tl.where(of_prefix, chunk * chunk_rows, start)
    before = tl.where(of_prefix, 0, before)
    inner = tl.where(of_prefix, length // CONFIG.BLOCK_Q, inner)
    tiles = tl.where(of_prefix, tl.cdiv(length, CONFIG.BLOCK_Q), tiles)
    distances = tl.where(of_prefix, -keys, 0), tl.where(of_prefix, keys, window)
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    factor = scale * LOG2_E
    k = load_rows(k_source, first, limit, CONFIG.BLOCK_K, True, CONFIG)
    v = load_rows(v_source, first, limit, CONFIG.BLOCK_K, True, CONFIG, True)
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
            q, do, m, inverse_sum, delta = load_queries(
                q_source, do_source, statistics, at, queries, True, CONFIG
            )
            p = transposed_probabilities(k, q, m, inverse_sum, factor, CONFIG)
            row = offset + (at + tl.arange(0, CONFIG.BLOCK_Q)) * every
            p = tl.where(sees(row[None, :], key[:, None], distances), p, 0.0)
            dk, dv = add_queries(dk, dv, p, v, q, do, delta, CONFIG)
        begin = start + before * CONFIG.BLOCK_Q
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
        store_rows(dk_ptr, dk, (batch, of_keys, first, keys, key_heads), CONFIG.D)
        store_rows(dv_ptr, dv, (batch, of_keys, first, keys, key_heads), CONFIG.DV)
