"""Triton kernels for few keys: all of a head's keys and values are one tile, which stays on chip
while the queries stream past.

    p = softmax(scale q k^T),  o = p v
    ds = p * (do v^T - delta),  delta = rowsum(p * do v^T) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

The softmax of a row is then complete at once: no running maximum, and the backward pass computes
it again, delta included, from the inputs alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG_2, length_of, load_rows, product, store_rows
from ..common.tiles_forward import add_sink, sink_of
from .tiles import masked_softmax


@triton.jit
def single_tile_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    key_lengths_ptr,
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
    chunk_rows,
    CONFIG: tl.constexpr,
):
    """One program computes chunk_rows rows of one head. The backward pass needs no statistics:
    softmax and o_low are None.
    """
    chunks = tl.cdiv(queries, chunk_rows)
    batch = tl.program_id(0) // chunks // heads
    head = tl.program_id(0) // chunks % heads
    start = tl.program_id(0) % chunks * chunk_rows
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    of_keys = head // group
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    length = length_of(key_lengths_ptr, batch, keys)
    k = load_rows(k_source, 0, length, CONFIG.BLOCK_K, True, CONFIG)
    v = load_rows(v_source, 0, length, CONFIG.BLOCK_K, True, CONFIG, True)
    end = tl.minimum(start + chunk_rows, queries)
    for first in tl.range(start, end, CONFIG.BLOCK_Q, num_stages=CONFIG.NUM_STAGES):
        q = load_rows(q_source, first, queries, CONFIG.BLOCK_Q, True, CONFIG)
        p, m, l = masked_softmax(q, k, scale, 0, length, CONFIG)
        if sinks_ptr is not None:
            p, m, l = add_sink(p, m, l, sink_of(sinks_ptr, head))
        if lse_ptr is not None:
            row = first + tl.arange(0, CONFIG.BLOCK_Q)
            at = lse_ptr + (batch * heads + head).to(tl.int64) * queries + row
            tl.store(at, (m + tl.log2(l)) * LOG_2, mask=row < queries)
        o = product(p.to(v.dtype), v, CONFIG)
        # Only a task without keys has a sum of zero, and none with a finite sink.
        o = o / tl.where(l == 0.0, 1.0, l)[:, None]
        store_rows(o_ptr, o, (batch, head, first, queries, heads), CONFIG.DV)


@triton.jit
def single_tile_backward_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dlse_ptr,
    key_lengths_ptr,
    sinks_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
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
    batches,
    chunk_rows,
    CONFIG: tl.constexpr,
):
    """One program computes dq of chunk_rows rows of each head that reads one head of keys, and
    their partial sums of dk and dv: all of dk and dv where there is one chunk. dsinks are partial
    sums of a task's chunk.
    """
    key_heads = heads // group
    chunks = tl.cdiv(queries, chunk_rows)
    chunk = tl.program_id(0) % chunks
    batch = tl.program_id(0) // chunks // key_heads
    of_keys = tl.program_id(0) // chunks % key_heads
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, of_keys, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, of_keys, keys
    length = length_of(key_lengths_ptr, batch, keys)
    k = load_rows(k_source, 0, length, CONFIG.BLOCK_K, True, CONFIG)
    v = load_rows(v_source, 0, length, CONFIG.BLOCK_K, True, CONFIG, True)
    dk = tl.full([CONFIG.BLOCK_K, CONFIG.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([CONFIG.BLOCK_K, CONFIG.BLOCK_V], 0.0, tl.float32)
    start = chunk * chunk_rows
    end = tl.minimum(start + chunk_rows, queries)
    for member in range(group):
        head = of_keys * group + member
        do_source = do_ptr, do_batch_stride, do_row_stride, do_head_stride, batch, head, queries
        q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
        dsink = tl.full([CONFIG.BLOCK_Q], 0.0, tl.float32)
        for first in tl.range(start, end, CONFIG.BLOCK_Q, num_stages=CONFIG.NUM_STAGES):
            q = load_rows(q_source, first, queries, CONFIG.BLOCK_Q, True, CONFIG)
            do = load_rows(do_source, first, queries, CONFIG.BLOCK_Q, True, CONFIG, True)
            p, m, l = masked_softmax(q, k, scale, 0, length, CONFIG)
            if sinks_ptr is not None:
                p, m, l = add_sink(p, m, l, sink_of(sinks_ptr, head))
            inverse_sum = 1.0 / tl.where(l == 0.0, 1.0, l)
            p = p * inverse_sum[:, None]
            dp = product(do, tl.trans(v), CONFIG)
            delta = tl.sum(p * dp, 1)
            if dlse_ptr is not None:
                row = first + tl.arange(0, CONFIG.BLOCK_Q)
                at = dlse_ptr + (batch * heads + head).to(tl.int64) * queries + row
                delta -= tl.load(at, mask=row < queries, other=0.0).to(tl.float32)
            if sinks_ptr is not None:
                of_sink = tl.exp2(sink_of(sinks_ptr, head) - m) * inverse_sum
                dsink -= of_sink * delta
            # dp and ds [BLOCK_Q, BLOCK_K]
            ds = (p * (dp - delta[:, None])).to(q.dtype)
            dv += product(tl.trans(p.to(do.dtype)), do, CONFIG)
            dk += product(tl.trans(ds), q, CONFIG)
            dq = product(ds, k, CONFIG) * scale
            # Without keys there is no gradient, not even the NaN of do.
            dq = tl.where(length > 0, dq, 0.0)
            store_rows(dq_ptr, dq, (batch, head, first, queries, heads), CONFIG.D)
        if sinks_ptr is not None:
            tl.store(dsinks_ptr + (chunk * batches + batch) * heads + head, tl.sum(dsink, 0))
    present = (tl.arange(0, CONFIG.BLOCK_K) < length)[:, None]
    dk, dv = tl.where(present, dk * scale, 0.0), tl.where(present, dv, 0.0)
    task = chunk * batches + batch
    store_rows(dk_ptr, dk, (task, of_keys, 0, keys, key_heads), CONFIG.D)
    store_rows(dv_ptr, dv, (task, of_keys, 0, keys, key_heads), CONFIG.DV)
