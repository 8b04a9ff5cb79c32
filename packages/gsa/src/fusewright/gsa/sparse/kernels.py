"""Triton kernel of sparse attention, one query at a time, the forward pass.

    s_tr = scale q_t . k_j(t,r)    lse_t = log sum_r exp(s_tr)
    o_t  = sum_r exp(s_tr - lse_t) v_j(t,r)

One program takes the query heads that share a head of keys, and their selection, as the rows of a
tile, and gathers the selected keys and values as its columns. The softmax is computed online.

Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import product_in_order
from ..common.tiles import LOG2_E, LOG_2
from .tiles import gather_rows, head_rows, load_selected, place_of, selection_of


@triton.jit
def sparse_forward_kernel(
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
        key, valid = load_selected(indices_at, start, last, keys, BLOCK_K)
        k = gather_rows(k_corner, key, valid, k_row_stride, D, BLOCK_D)
        # [BLOCK_G, BLOCK_K]
        s = product_in_order(q, tl.trans(k), UPCAST, PRECISION) * (scale * LOG2_E)
        s = tl.where(valid[None, :], s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1))
        # Without a key so far the maximum is -inf, whose distance to itself is NaN.
        finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s - finite[:, None])
        rescale = tl.exp2(m - finite)
        v = gather_rows(v_corner, key, valid, v_row_stride, D, BLOCK_D)
        # [BLOCK_G, BLOCK_D]
        o = o * rescale[:, None] + product_in_order(p.to(v.dtype), v, UPCAST, PRECISION)
        l = l * rescale + tl.sum(p, 1)
        m = m_next

    inverse_l = tl.where(l == 0.0, 0.0, 1.0 / tl.where(l == 0.0, 1.0, l))
    o = o * inverse_l[:, None]
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LOG_2)
    head = tl.arange(0, BLOCK_G)
    to_lse = (batch * heads + group * ROWS + head) * queries + query
    tl.store(lse_ptr + to_lse, lse, mask=head < ROWS)
    if KEEP:
        tl.store(softmax_ptr + to_lse, tl.where(l == 0.0, 0.0, m), mask=head < ROWS)
        tl.store(softmax_ptr + rows + to_lse, inverse_l, mask=head < ROWS)
    to_query = (batch * queries + query) * heads * D
    o_at, _ = head_rows(o_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=inside)
    if HAS_WIDE:
        o_at, _ = head_rows(o_wide_ptr + to_query, group * ROWS, ROWS, D, D, BLOCK_G, BLOCK_D)
        tl.store(o_at, o, mask=inside)
