"""Triton kernels of sparse attention, one query at a time: forward, and the gradient of q.

One program takes the query heads that share a head of keys, and their selection, as the rows of a
tile, and gathers the selected keys and values as its columns. The softmax is computed online.

Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import LOG2_E, LOG_2, product, product_with_rows


@triton.jit
def place_of(queries, groups):
    """Which sequence, query and group of heads a program takes: neighbours share the selection."""
    group = tl.program_id(0) % groups
    query = tl.program_id(0) // groups % queries
    batch = tl.program_id(0) // groups // queries
    return batch.to(tl.int64), query, group


@triton.jit
def selection_of(
    indices_source,
    count_source,
    batch,
    query,
    group,
    slots,
    HAS_COUNT: tl.constexpr,
):
    """Where a query's selection starts, and how many of its slots are looked at; the sources tell
    where they are: the pointer, and the strides of sequences, heads and queries.
    """
    indices_ptr, batch_stride, head_stride, row_stride = indices_source
    at = indices_ptr + batch * batch_stride + group.to(tl.int64) * head_stride
    at += query.to(tl.int64) * row_stride
    last = slots
    if HAS_COUNT:
        count_ptr, batch_stride, head_stride, row_stride = count_source
        count_at = count_ptr + batch * batch_stride + group.to(tl.int64) * head_stride
        count = tl.load(count_at + query.to(tl.int64) * row_stride)
        last = tl.minimum(count, slots).to(tl.int32)
    return at, last


@triton.jit
def load_selected(indices_at, start, slots, keys, BLOCK_K: tl.constexpr):
    """The keys in slots ``start``, ``start + 1``, ..., and which of them there are."""
    slot = start + tl.arange(0, BLOCK_K)
    key = tl.load(indices_at + slot, mask=slot < slots, other=-1).to(tl.int64)
    return key, (key >= 0) & (key < keys)


@triton.jit
def gather_rows(corner, row, there, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """These rows of a head, zeros for those that are not there, whose addresses are not read."""
    col = tl.arange(0, BLOCK_D)
    at = corner + ((row * row_stride)[:, None] + col[None, :])
    return tl.load(at, mask=there[:, None] & (col < D)[None, :], other=0.0)


@triton.jit
def head_rows(
    corner, first, ROWS: tl.constexpr, head_stride, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Addresses of the rows of a query's heads from ``first`` on, and which of them there are."""
    head, col = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    at = corner + ((first + head).to(tl.int64) * head_stride)[:, None] + col[None, :]
    return at, (head < ROWS)[:, None] & (col < D)[None, :]


@triton.jit
def _sparse_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    count_ptr,
    o_ptr,
    lse_ptr,
    softmax_ptr,
    o_wide_ptr,
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
    indices_batch_stride,
    indices_head_stride,
    indices_row_stride,
    count_batch_stride,
    count_head_stride,
    count_row_stride,
    queries,
    keys,
    heads,
    groups,
    shared,
    slots,
    rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes the ROWS heads of a group for one query; ``shared``: so many groups have
    one head of keys.
    """
    batch, query, group = place_of(queries, groups)
    key_head = (group // shared).to(tl.int64)
    q_corner = q_ptr + batch * q_batch_stride + query.to(tl.int64) * q_row_stride
    q_at, inside = head_rows(q_corner, group * ROWS, ROWS, q_head_stride, D, BLOCK_G, BLOCK_D)
    q = tl.load(q_at, mask=inside, other=0.0)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    indices_at, last = selection_of(
        (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
        (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
        *(batch, query, group, slots, HAS_COUNT),
    )

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    o = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(0, last, BLOCK_K, num_stages=NUM_STAGES):
        key, there = load_selected(indices_at, start, last, keys, BLOCK_K)
        k = gather_rows(k_corner, key, there, k_row_stride, D, BLOCK_D)
        s = product(q, tl.trans(k), UPCAST, PRECISION) * (scale * LOG2_E)
        s = tl.where(there[None, :], s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1))
        # Without a key so far the maximum is -inf, whose distance to itself is NaN.
        finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s - finite[:, None])
        rescale = tl.exp2(m - finite)
        v = gather_rows(v_corner, key, there, v_row_stride, D, BLOCK_D)
        o = o * rescale[:, None] + product(p.to(v.dtype), v, UPCAST, PRECISION)
        l = l * rescale + tl.sum(p, 1)
        m = m_next

    share = tl.where(l == 0.0, 0.0, 1.0 / tl.where(l == 0.0, 1.0, l))
    o = o * share[:, None]
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LOG_2)
    head = tl.arange(0, BLOCK_G)
    to_lse = (batch * heads + group * ROWS + head) * queries + query
    tl.store(lse_ptr + to_lse, lse, mask=head < ROWS)
    if KEEP:
        tl.store(softmax_ptr + to_lse, tl.where(l == 0.0, 0.0, m), mask=head < ROWS)
        tl.store(softmax_ptr + rows + to_lse, share, mask=head < ROWS)
    to_query = (batch * queries + query) * heads * D
    o_at, _ = head_rows(o_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=inside)
    if HAS_WIDE:
        o_at, _ = head_rows(o_wide_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
        tl.store(o_at, o, mask=inside)


@triton.jit
def _sparse_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    count_ptr,
    o_ptr,
    softmax_ptr,
    do_ptr,
    dlse_ptr,
    dq_ptr,
    delta_ptr,
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
    indices_batch_stride,
    indices_head_stride,
    indices_row_stride,
    count_batch_stride,
    count_head_stride,
    count_row_stride,
    queries,
    keys,
    heads,
    groups,
    shared,
    slots,
    rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes dq of the ROWS heads of a group for one query, and their delta."""
    batch, query, group = place_of(queries, groups)
    key_head = (group // shared).to(tl.int64)
    q_corner = q_ptr + batch * q_batch_stride + query.to(tl.int64) * q_row_stride
    q_at, inside = head_rows(q_corner, group * ROWS, ROWS, q_head_stride, D, BLOCK_G, BLOCK_D)
    q = tl.load(q_at, mask=inside, other=0.0)
    to_query = (batch * queries + query) * heads * D
    o_at, _ = head_rows(o_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
    do_at, _ = head_rows(do_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
    o = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_at, mask=inside, other=0.0)
    head = tl.arange(0, BLOCK_G)
    to_lse = (batch * heads + group * ROWS + head) * queries + query
    m = tl.load(softmax_ptr + to_lse, mask=head < ROWS, other=0.0)
    share = tl.load(softmax_ptr + rows + to_lse, mask=head < ROWS, other=0.0)
    delta = tl.sum(o * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + to_lse, mask=head < ROWS, other=0.0).to(tl.float32)
    tl.store(delta_ptr + to_lse, delta, mask=head < ROWS)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    indices_at, last = selection_of(
        (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
        (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
        *(batch, query, group, slots, HAS_COUNT),
    )

    dq = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(0, last, BLOCK_K, num_stages=NUM_STAGES):
        key, there = load_selected(indices_at, start, last, keys, BLOCK_K)
        k = gather_rows(k_corner, key, there, k_row_stride, D, BLOCK_D)
        v = gather_rows(v_corner, key, there, v_row_stride, D, BLOCK_D)
        s = product_with_rows(q, k, UPCAST, PRECISION) * (scale * LOG2_E)
        p = tl.where(there[None, :], tl.exp2(s - m[:, None]) * share[:, None], 0.0)
        dp = product_with_rows(do, v, UPCAST, PRECISION)
        ds = tl.where(there[None, :], p * (dp - delta[:, None]), 0.0)
        dq += product(ds.to(k.dtype), k, UPCAST, PRECISION)

    dq_at, _ = head_rows(dq_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)
