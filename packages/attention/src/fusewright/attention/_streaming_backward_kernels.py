"""Triton kernels of the backward pass over many keys: one for dq, one for dk and dv.

Both compute the probabilities anew, from the scores and from the maximum m of each row and the
share 1 / l of its sum, as the forward pass had them: with the log-sum-exp, its rounding would make
a great score's probability wrong. delta takes o as it was before its rounding, from o and its rest:
where one key has nearly all the weight, do v^T - delta is a small difference. In fp32 even that is
not enough: two sums of the same products, do v^T and do o, are rounded apart. There delta becomes
rowsum(p * do v^T), found while the keys pass, and dq is corrected for it. Each kernel sums what it
owns in registers, in the order of the other axis, so nothing is added atomically.

    p = exp(s - m) / l,  ds = p * (do v^T - delta),  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import LOG2_E, length_of, load_rows, product, store_rows


@triton.jit
def score_slopes(
    q, k, v, do, m, share, delta, factor, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):
    """p and ds of a tile of scores, [queries, keys]; the row's sum has yet to divide both, but in
    fp16, whose range it might leave, not ds.
    """
    p = tl.exp2(product(q, tl.trans(k), UPCAST, PRECISION) * factor - m[:, None])
    ds = p * (product(do, tl.trans(v), UPCAST, PRECISION) - delta[:, None])
    if q.dtype == tl.float16:
        ds = ds * share[:, None]
    return p, ds


@triton.jit
def add_keys(dq, pk, excess, p, ds, k, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """dq with what a tile of keys says of it; in fp32 also sum(p k), and by how much the sum of ds
    is not zero, for ``finished_dq``.
    """
    dq += product(ds.to(k.dtype), k, UPCAST, PRECISION)
    if k.dtype == tl.float32:
        pk += product(p, k, UPCAST, PRECISION)
        excess += tl.sum(ds, 1)
    return dq, pk, excess


@triton.jit
def finished_dq(
    dq, pk, excess, share, delta, dlse, scale, delta_ptr, at, there, dtype: tl.constexpr
):
    """dq from the sums over all keys. In fp32 delta was rowsum(do * o) alone: what is missing from
    rowsum(p * do v^T) - dlse is put into dq, and delta written as it should be.
    """
    if dtype != tl.float16:
        dq = dq * share[:, None]
    if dtype == tl.float32:
        missing = excess * share - dlse
        dq -= missing[:, None] * (pk * share[:, None])
        tl.store(delta_ptr + at, delta + missing, mask=there)
    return dq * scale


@triton.jit
def load_statistics(
    do,
    o_ptr,
    rest_ptr,
    dlse_ptr,
    softmax_ptr,
    delta_ptr,
    batch,
    head,
    first,
    queries,
    heads,
    rows,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """The maximum, one over the sum, delta and dlse of a tile of queries; where the rows are, and
    whether they are there. delta is written too, but in fp32, where it has yet to be corrected and
    dlse is not yet in it.
    """
    # It may need 64 bits.
    task_stride = tl.cast(queries, tl.int64) * heads * D
    o_source = o_ptr, task_stride, heads * D, D, batch, head, queries
    o = load_rows(o_source, first, queries, BLOCK_Q, True, D, BLOCK_D, False).to(tl.float32)
    if HAS_REST:
        rest_source = rest_ptr, task_stride, heads * D, D, batch, head, queries
        o += load_rows(rest_source, first, queries, BLOCK_Q, True, D, BLOCK_D, False)
    row = first + tl.arange(0, BLOCK_Q)
    at = (batch * heads + head).to(tl.int64) * queries + row
    there = row < queries
    delta = tl.sum(do.to(tl.float32) * o, 1)
    dlse = tl.zeros([BLOCK_Q], tl.float32)
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + at, mask=there, other=0.0).to(tl.float32)
    if do.dtype != tl.float32:
        delta -= dlse
        tl.store(delta_ptr + at, delta, mask=there)
    m = tl.load(softmax_ptr + at, mask=there, other=0.0)
    share = tl.load(softmax_ptr + rows + at, mask=there, other=0.0)
    return m, share, delta, dlse, at, there


@triton.jit
def _streaming_dq_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    dlse_ptr,
    key_lengths_ptr,
    o_ptr,
    rest_ptr,
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
    HAS_REST: tl.constexpr,
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
    m, share, delta, dlse, at, there = load_statistics(
        *(do, o_ptr, rest_ptr, dlse_ptr, softmax_ptr, delta_ptr),
        *(batch, head, first, queries, heads, rows),
        *(D, BLOCK_Q, BLOCK_D, HAS_DLSE, HAS_REST),
    )
    q = load_rows(q_source, first, queries, BLOCK_Q, not DESCRIPTORS, D, BLOCK_D, DESCRIPTORS)

    # The last keys come first: they alone need a mask, and the loop none.
    last = tl.maximum(tl.cdiv(length, BLOCK_K) - 1, 0) * BLOCK_K
    k = load_rows(k_source, last, length, BLOCK_K, True, D, BLOCK_D, DESCRIPTORS)
    v = load_rows(v_source, last, length, BLOCK_K, True, D, BLOCK_D, DESCRIPTORS)
    p, ds = score_slopes(q, k, v, do, m, share, delta, factor, UPCAST, PRECISION)
    seen = (last + tl.arange(0, BLOCK_K) < length)[None, :]
    p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
    nothing = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    excess = tl.zeros([BLOCK_Q], tl.float32)
    dq, pk, excess = add_keys(nothing, nothing, excess, p, ds, k, UPCAST, PRECISION)
    for start in tl.range(0, last, BLOCK_K, num_stages=NUM_STAGES):
        k = load_rows(k_source, start, length, BLOCK_K, False, D, BLOCK_D, DESCRIPTORS)
        v = load_rows(v_source, start, length, BLOCK_K, False, D, BLOCK_D, DESCRIPTORS)
        p, ds = score_slopes(q, k, v, do, m, share, delta, factor, UPCAST, PRECISION)
        dq, pk, excess = add_keys(dq, pk, excess, p, ds, k, UPCAST, PRECISION)
    dq = finished_dq(dq, pk, excess, share, delta, dlse, scale, delta_ptr, at, there, q.dtype)
    if q.dtype == tl.float32:
        # Nothing comes from no keys, not even the NaN of a gradient.
        dq = tl.where(length > 0, dq, 0.0)
    store_rows(dq_ptr, dq, batch, head, first, queries, heads, D, BLOCK_Q, BLOCK_D)


@triton.jit
def load_queries(
    q_source,
    do_source,
    m_ptr,
    share_ptr,
    delta_ptr,
    first,
    queries,
    BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """A tile of queries: q, do, the maximum, one over the sum, and delta."""
    q = load_rows(q_source, first, queries, BLOCK_Q, MASKED, D, BLOCK_D, DESCRIPTORS)
    do = load_rows(do_source, first, queries, BLOCK_Q, MASKED, D, BLOCK_D, DESCRIPTORS)
    row = first + tl.arange(0, BLOCK_Q)
    if MASKED:
        # The probabilities of rows that are not there are exp(-inf).
        m = tl.load(m_ptr + row, mask=row < queries, other=float("inf"))
        share = tl.load(share_ptr + row, mask=row < queries, other=0.0)
        delta = tl.load(delta_ptr + row, mask=row < queries, other=0.0)
    else:
        m = tl.load(m_ptr + row)
        share = tl.load(share_ptr + row)
        delta = tl.load(delta_ptr + row)
    return q, do, m, share, delta


@triton.jit
def turned_probabilities(k, q, m, share, factor, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """The probabilities of a tile, [keys, queries]: so they, and ds, are the left operands of the
    products for dv and dk, and stay in registers.
    """
    p = tl.exp2(product(k, tl.trans(q), UPCAST, PRECISION) * factor - m[None, :])
    return p * share[None, :]


@triton.jit
def add_queries(dk, dv, p, v, q, do, delta, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv with what a tile of queries says of them."""
    dv += product(p.to(do.dtype), do, UPCAST, PRECISION)
    ds = p * (product(v, tl.trans(do), UPCAST, PRECISION) - delta[None, :])
    dk += product(ds.to(q.dtype), q, UPCAST, PRECISION)
    return dk, dv


@triton.jit
def _streaming_dkdv_kernel(
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
        # The last queries come first: they alone need a mask, and the loop none.
        last = (tl.cdiv(queries, BLOCK_Q) - 1) * BLOCK_Q
        of_head = (batch * heads + head).to(tl.int64) * queries
        m_ptr, share_ptr = softmax_ptr + of_head, softmax_ptr + rows + of_head
        delta_ptr += of_head
        q, do, m, share, delta = load_queries(
            *(q_source, do_source, m_ptr, share_ptr, delta_ptr, last, queries),
            *(BLOCK_Q, True, D, BLOCK_D, DESCRIPTORS),
        )
        p = turned_probabilities(k, q, m, share, factor, UPCAST, PRECISION)
        dk, dv = add_queries(dk, dv, p, v, q, do, delta, UPCAST, PRECISION)
        for start in tl.range(0, last, BLOCK_Q, num_stages=NUM_STAGES):
            q, do, m, share, delta = load_queries(
                *(q_source, do_source, m_ptr, share_ptr, delta_ptr, start, queries),
                *(BLOCK_Q, False, D, BLOCK_D, DESCRIPTORS),
            )
            p = turned_probabilities(k, q, m, share, factor, UPCAST, PRECISION)
            dk, dv = add_queries(dk, dv, p, v, q, do, delta, UPCAST, PRECISION)
    # What keys past the length would get has no meaning: their scores were never masked.
    counted = (first + tl.arange(0, BLOCK_K) < length)[:, None]
    dk, dv = tl.where(counted, dk * scale, 0.0), tl.where(counted, dv, 0.0)
    store_rows(dk_ptr, dk, batch, head, first, keys, heads, D, BLOCK_K, BLOCK_D)
    store_rows(dv_ptr, dv, batch, head, first, keys, heads, D, BLOCK_K, BLOCK_D)
