"""Triton kernels of the backward pass over many keys: one for dq, one for dk and dv.

    p = exp(s - m) / l,  ds = p * (do v^T - delta),  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

Each kernel sums what it owns in registers, in the order of the other axis, so nothing is added
atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, length_of, load_rows, store_rows
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


@triton.jit
def streaming_dq_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dlse_ptr,
    key_lengths_ptr,
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
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes delta and dq of BLOCK_Q rows of one head, and what they add to its
    dsink; keys stream past.
    """
    WITH_SINK: tl.constexpr = sinks_ptr is not None
    tiles = tl.cdiv(queries, CONFIG.BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    first = tl.program_id(0) % tiles * CONFIG.BLOCK_Q
    do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    of_keys = head // group
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    length = length_of(key_lengths_ptr, batch, keys)
    factor = scale * LOG2_E
    do = load_rows(do_source, first, queries, CONFIG.BLOCK_Q, not CONFIG.DESCRIPTORS, CONFIG, True)
    of_tile = batch, head, first, queries, heads
    m, inverse_sum, delta, dlse, at, inside = load_statistics(
        do, o_ptr, o_low_ptr, dlse_ptr, softmax_ptr, delta_ptr, of_tile, rows, CONFIG
    )
    q = load_rows(q_source, first, queries, CONFIG.BLOCK_Q, not CONFIG.DESCRIPTORS, CONFIG)

    # The last keys come first: only they need a mask, the loop needs none.
    last = tl.maximum(tl.cdiv(length, CONFIG.BLOCK_K) - 1, 0) * CONFIG.BLOCK_K
    k = load_rows(k_source, last, length, CONFIG.BLOCK_K, True, CONFIG)
    v = load_rows(v_source, last, length, CONFIG.BLOCK_K, True, CONFIG, True)
    p, ds = score_gradients(q, k, v, do, m, inverse_sum, delta, factor, CONFIG)
    seen = (last + tl.arange(0, CONFIG.BLOCK_K) < length)[None, :]
    p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
    zeros = tl.full([CONFIG.BLOCK_Q, CONFIG.BLOCK_D], 0.0, tl.float32)
    excess = tl.full([CONFIG.BLOCK_Q], 0.0, tl.float32)
    if sinks_ptr is not None:
        excess += excess_of_sink(delta, m, inverse_sum, sinks_ptr, head, q.dtype)
    dq, pk, excess = add_keys(zeros, zeros, excess, p, ds, k, CONFIG, WITH_SINK)
    for start in tl.range(0, last, CONFIG.BLOCK_K, num_stages=CONFIG.NUM_STAGES):
        k = load_rows(k_source, start, length, CONFIG.BLOCK_K, False, CONFIG)
        v = load_rows(v_source, start, length, CONFIG.BLOCK_K, False, CONFIG, True)
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
    if q.dtype == tl.float32:
        # Without keys there is no gradient, not even the NaN of do.
        dq = tl.where(length > 0, dq, 0.0)
    store_rows(dq_ptr, dq, of_tile, CONFIG.D)


@triton.jit
def streaming_dkdv_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    key_lengths_ptr,
    softmax_ptr,
    delta_ptr,
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
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes dk and dv of BLOCK_K keys of one head; queries stream past, those of
    each head that reads these keys.
    """
    key_heads = heads // group
    tiles = tl.cdiv(keys, CONFIG.BLOCK_K)
    batch = tl.program_id(0) // tiles // key_heads
    of_keys = tl.program_id(0) // tiles % key_heads
    first = tl.program_id(0) % tiles * CONFIG.BLOCK_K
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    length = length_of(key_lengths_ptr, batch, keys)
    factor = scale * LOG2_E
    dk = tl.full([CONFIG.BLOCK_K, CONFIG.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([CONFIG.BLOCK_K, CONFIG.BLOCK_V], 0.0, tl.float32)
    if first < length:
        k = load_rows(k_source, first, keys, CONFIG.BLOCK_K, not CONFIG.DESCRIPTORS, CONFIG)
        v = load_rows(v_source, first, keys, CONFIG.BLOCK_K, not CONFIG.DESCRIPTORS, CONFIG, True)
        # The last queries come first: only they need a mask, the loop needs none.
        last = (tl.cdiv(queries, CONFIG.BLOCK_Q) - 1) * CONFIG.BLOCK_Q
        for member in range(group):
            head = of_keys * group + member
            do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
            q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
            statistics = statistics_of(softmax_ptr, delta_ptr, batch, head, queries, heads, rows)
            q, do, m, inverse_sum, delta = load_queries(
                q_source, do_source, statistics, last, queries, True, CONFIG
            )
            p = transposed_probabilities(k, q, m, inverse_sum, factor, CONFIG)
            dk, dv = add_queries(dk, dv, p, v, q, do, delta, CONFIG)
            for start in tl.range(0, last, CONFIG.BLOCK_Q, num_stages=CONFIG.NUM_STAGES):
                q, do, m, inverse_sum, delta = load_queries(
                    q_source, do_source, statistics, start, queries, False, CONFIG
                )
                p = transposed_probabilities(k, q, m, inverse_sum, factor, CONFIG)
                dk, dv = add_queries(dk, dv, p, v, q, do, delta, CONFIG)
    # The sums of keys past the length have no meaning: their scores were not masked.
    present = (first + tl.arange(0, CONFIG.BLOCK_K) < length)[:, None]
    dk, dv = tl.where(present, dk * scale, 0.0), tl.where(present, dv, 0.0)
    store_rows(dk_ptr, dk, (batch, of_keys, first, keys, key_heads), CONFIG.D)
    store_rows(dv_ptr, dv, (batch, of_keys, first, keys, key_heads), CONFIG.DV)
