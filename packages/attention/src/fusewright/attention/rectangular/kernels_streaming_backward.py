"""Triton kernels of the backward pass over many keys: one for dq, one for dk and dv.

    p = exp(s - m) / l,  ds = p * (do v^T - delta),  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

Each kernel sums what it owns in registers, in the order of the other axis, so nothing is added
atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, load_rows, store_rows
from ..common.tiles_backward import (
    add_keys,
    add_queries,
    finished_dq,
    load_queries,
    load_statistics,
    score_gradients,
    transposed_probabilities,
)
from .tiles import length_of


@triton.jit
def streaming_dq_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dlse_ptr,
    key_lengths_ptr,
    o_ptr,
    o_low_ptr,
    softmax_ptr,
    delta_ptr,
    dq_ptr,
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
    rows,
    D: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_O_LOW: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes delta and dq of BLOCK_Q rows of one head; keys stream past."""
    tiles = tl.cdiv(queries, BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    first = tl.program_id(0) % tiles * BLOCK_Q
    do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, head, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, head, keys
    length = length_of(key_lengths_ptr, batch, keys, HAS_LENGTHS)
    factor = scale * LOG2_E
    do = load_rows(do_source, first, queries, BLOCK_Q, not DESCRIPTORS, D, BLOCK_D, DESCRIPTORS)
    m, inverse_sum, delta, dlse, at, inside = load_statistics(
        *(do, o_ptr, o_low_ptr, dlse_ptr, softmax_ptr, delta_ptr),
        *(batch, head, first, queries, heads, rows),
        *(D, BLOCK_Q, BLOCK_D, HAS_DLSE, HAS_O_LOW),
    )
    q = load_rows(q_source, first, queries, BLOCK_Q, not DESCRIPTORS, D, BLOCK_D, DESCRIPTORS)

    # The last keys come first: only they need a mask, the loop needs none.
    last = tl.maximum(tl.cdiv(length, BLOCK_K) - 1, 0) * BLOCK_K
    k = load_rows(k_source, last, length, BLOCK_K, True, D, BLOCK_D, DESCRIPTORS)
    v = load_rows(v_source, last, length, BLOCK_K, True, D, BLOCK_D, DESCRIPTORS)
    p, ds = score_gradients(q, k, v, do, m, inverse_sum, delta, factor, UPCAST, PRECISION)
    seen = (last + tl.arange(0, BLOCK_K) < length)[None, :]
    p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
    zeros = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    excess = tl.zeros([BLOCK_Q], tl.float32)
    dq, pk, excess = add_keys(zeros, zeros, excess, p, ds, k, UPCAST, PRECISION)
    for start in tl.range(0, last, BLOCK_K, num_stages=NUM_STAGES):
        k = load_rows(k_source, start, length, BLOCK_K, False, D, BLOCK_D, DESCRIPTORS)
        v = load_rows(v_source, start, length, BLOCK_K, False, D, BLOCK_D, DESCRIPTORS)
        p, ds = score_gradients(q, k, v, do, m, inverse_sum, delta, factor, UPCAST, PRECISION)
        dq, pk, excess = add_keys(dq, pk, excess, p, ds, k, UPCAST, PRECISION)
    dq = finished_dq(
        dq, pk, excess, inverse_sum, delta, dlse, scale, delta_ptr, at, inside, q.dtype
    )
    if q.dtype == tl.float32:
        # Without keys there is no gradient, not even the NaN of do.
        dq = tl.where(length > 0, dq, 0.0)
    store_rows(dq_ptr, dq, batch, head, first, queries, heads, D, BLOCK_Q, BLOCK_D)


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
    rows,
    D: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes dk and dv of BLOCK_K keys of one head; queries stream past."""
    tiles = tl.cdiv(keys, BLOCK_K)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    first = tl.program_id(0) % tiles * BLOCK_K
    do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, head, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, head, keys
    length = length_of(key_lengths_ptr, batch, keys, HAS_LENGTHS)
    factor = scale * LOG2_E
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    if first < length:
        k = load_rows(k_source, first, keys, BLOCK_K, not DESCRIPTORS, D, BLOCK_D, DESCRIPTORS)
        v = load_rows(v_source, first, keys, BLOCK_K, not DESCRIPTORS, D, BLOCK_D, DESCRIPTORS)
        # The last queries come first: only they need a mask, the loop needs none.
        last = (tl.cdiv(queries, BLOCK_Q) - 1) * BLOCK_Q
        head_offset = (batch * heads + head).to(tl.int64) * queries
        m_ptr, inverse_sum_ptr = softmax_ptr + head_offset, softmax_ptr + rows + head_offset
        delta_ptr += head_offset
        q, do, m, inverse_sum, delta = load_queries(
            *(q_source, do_source, m_ptr, inverse_sum_ptr, delta_ptr, last, queries),
            *(BLOCK_Q, True, D, BLOCK_D, DESCRIPTORS),
        )
        p = transposed_probabilities(k, q, m, inverse_sum, factor, UPCAST, PRECISION)
        dk, dv = add_queries(dk, dv, p, v, q, do, delta, UPCAST, PRECISION)
        for start in tl.range(0, last, BLOCK_Q, num_stages=NUM_STAGES):
            q, do, m, inverse_sum, delta = load_queries(
                *(q_source, do_source, m_ptr, inverse_sum_ptr, delta_ptr, start, queries),
                *(BLOCK_Q, False, D, BLOCK_D, DESCRIPTORS),
            )
            p = transposed_probabilities(k, q, m, inverse_sum, factor, UPCAST, PRECISION)
            dk, dv = add_queries(dk, dv, p, v, q, do, delta, UPCAST, PRECISION)
    # The sums of keys past the length have no meaning: their scores were not masked.
    present = (first + tl.arange(0, BLOCK_K) < length)[:, None]
    dk, dv = tl.where(present, dk * scale, 0.0), tl.where(present, dv, 0.0)
    store_rows(dk_ptr, dk, batch, head, first, keys, heads, D, BLOCK_K, BLOCK_D)
    store_rows(dv_ptr, dv, batch, head, first, keys, heads, D, BLOCK_K, BLOCK_D)
