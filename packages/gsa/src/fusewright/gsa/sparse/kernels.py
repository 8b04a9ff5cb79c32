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

from ..common.tiles import LOG2_E, product, zeros
from .tiles import (
    gather_rows,
    head_rows,
    load_selected,
    online_softmax,
    place_of,
    selection_of,
    store_softmax,
)


@triton.jit
def attend(
    q_source,
    k_source,
    v_source,
    indices_source,
    count_source,
    outputs,
    scale,
    at,
    sizes,
    STAGES: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Attention of HEADS heads of one query. ``at``: its sequence and number, the first of the
    heads, their head of keys and their selection. Sources tell where operands are: the pointer, and
    the strides of sequences, tokens and heads (indices and count: sequences, heads and queries).
    """
    q_ptr, q_batch_stride, q_row_stride, q_head_stride = q_source
    k_ptr, k_batch_stride, k_row_stride, k_head_stride = k_source
    v_ptr, v_batch_stride, v_row_stride, v_head_stride = v_source
    o_ptr, lse_ptr, softmax_ptr, o_wide_ptr = outputs
    batch, query, first_head, key_head, selection = at
    queries, keys, heads, slots, rows = sizes
    q_corner = q_ptr + batch * q_batch_stride + query.to(tl.int64) * q_row_stride
    q_at, inside = head_rows(q_corner, first_head, q_head_stride, CONFIG)
    q = tl.load(q_at, mask=inside, other=0.0)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    indices_at, last = selection_of(indices_source, count_source, batch, query, selection, slots)

    m = zeros(CONFIG.BLOCK_G) - float("inf")
    l = zeros(CONFIG.BLOCK_G)
    o = zeros(CONFIG.BLOCK_G, CONFIG.BLOCK_D)
    for start in tl.range(0, last, CONFIG.BLOCK, num_stages=STAGES):
        key, valid = load_selected(indices_at, start, last, keys, CONFIG.BLOCK)
        k = gather_rows(k_corner, key, valid, k_row_stride, CONFIG)
        # [BLOCK_G, BLOCK_K]
        s = product(q, tl.trans(k), CONFIG) * (scale * LOG2_E)
        s = tl.where(valid[None, :], s, float("-inf"))
        m, p, rescale = online_softmax(m, s, 1.0)
        v = gather_rows(v_corner, key, valid, v_row_stride, CONFIG)
        # [BLOCK_G, BLOCK_D]
        o = o * rescale[:, None] + product(p.to(v.dtype), v, CONFIG)
        l = l * rescale + tl.sum(p, 1)

    inverse_l = tl.where(l == 0.0, 0.0, 1.0 / tl.where(l == 0.0, 1.0, l))
    o = o * inverse_l[:, None]
    head = tl.arange(0, CONFIG.BLOCK_G)
    to_lse = (batch * heads + first_head + head) * queries + query
    store_softmax(lse_ptr, softmax_ptr, to_lse, rows, m, l, inverse_l, head < CONFIG.HEADS)
    to_query = (batch * queries + query) * heads * CONFIG.D
    o_at, _ = head_rows(o_ptr + to_query, first_head, CONFIG.D, CONFIG)
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=inside)
    if o_wide_ptr is not None:
        o_at, _ = head_rows(o_wide_ptr + to_query, first_head, CONFIG.D, CONFIG)
        tl.store(o_at, o, mask=inside)


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
    CONFIG: tl.constexpr,
):
    """One program computes the ROWS heads of a group for one query; ``shared``: so many groups have
    one head of keys.
    """
    batch, query, group = place_of(queries, groups)
    key_head = (group // shared).to(tl.int64)
    attend(
        (q_ptr, q_batch_stride, q_row_stride, q_head_stride),
        (k_ptr, k_batch_stride, k_row_stride, k_head_stride),
        (v_ptr, v_batch_stride, v_row_stride, v_head_stride),
        (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
        (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
        (o_ptr, lse_ptr, softmax_ptr, o_wide_ptr),
        scale,
        (batch, query, group * CONFIG.HEADS, key_head, group),
        (queries, keys, heads, slots, rows),
        CONFIG.NUM_STAGES,
        CONFIG,
    )


@triton.jit
def marked_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    count_ptr,
    bits_ptr,
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
    first,
    part,
    selections,
    marks,
    queries,
    keys,
    heads,
    groups,
    shared,
    slots,
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes a group's heads for those of TILE queries that are marked, since they
    name a key again, where any of ``part`` queries from ``first`` on is.
    """
    if tl.load(bits_ptr + marks) != 0:
        batch, tile, group = place_of(tl.cdiv(part, CONFIG.TILE), groups)
        key_head = (group // shared).to(tl.int64)
        marks_at = bits_ptr + marks + 1 + (batch * selections + group % selections) * part
        for step in range(0, CONFIG.TILE):
            one = tile * CONFIG.TILE + step
            if tl.load(marks_at + one, mask=one < part, other=0) != 0:
                attend(
                    (q_ptr, q_batch_stride, q_row_stride, q_head_stride),
                    (k_ptr, k_batch_stride, k_row_stride, k_head_stride),
                    (v_ptr, v_batch_stride, v_row_stride, v_head_stride),
                    (indices_ptr, indices_batch_stride, indices_head_stride, indices_row_stride),
                    (count_ptr, count_batch_stride, count_head_stride, count_row_stride),
                    (o_ptr, lse_ptr, softmax_ptr, o_wide_ptr),
                    scale,
                    (batch, first + one, group * CONFIG.HEADS, key_head, group),
                    (queries, keys, heads, slots, rows),
                    1,
                    CONFIG,
                )
