"""Triton kernel of sparse attention by tiles of queries, with the union of the keys that they have
selected as columns, the forward pass; the formula is that of ``kernels``.

A tile of scores is a product on tensor cores; a bit for each query and key says which of them
count. Rows of a tile are queries, each with STACK heads that share keys and selection. The softmax
is computed online.

Milakov and Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import product_in_order
from ..common.tiles import LOG2_E, LOG_2
from .tiles import are_members, load_listed, tile_of


@triton.jit
def union_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    list_ptr,
    members_ptr,
    length_ptr,
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
    first,
    queries,
    heads,
    shared,
    selections,
    tiles,
    capacity,
    rows,
    D: tl.constexpr,
    KEEP: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    STACK: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes STACK heads of TILE queries, from the query ``first`` on; ``shared``
    neighbouring heads have one head of keys.
    """
    tile, block, batch, number = tile_of(tiles, selections, STACK, heads // STACK)
    row = tl.arange(0, TILE * STACK)
    place = row // STACK
    query = (first + tile * TILE + place).to(tl.int64)
    head = (block * STACK + row % STACK).to(tl.int64)
    key_head = (block * STACK // shared).to(tl.int64)
    col = tl.arange(0, BLOCK_D)
    inside = (query < queries)[:, None] & (col < D)[None, :]
    to_q = batch * q_batch_stride + query * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + to_q[:, None] + col[None, :], mask=inside, other=0.0)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    list_at = list_ptr + number * capacity
    members_at = members_ptr + number * WORDS * capacity
    factor = scale * LOG2_E

    m = tl.full([TILE * STACK], float("-inf"), tl.float32)
    l = tl.zeros([TILE * STACK], tl.float32)
    o = tl.zeros([TILE * STACK, BLOCK_D], tl.float32)
    for start in tl.range(0, tl.load(length_ptr + number), BLOCK_K, num_stages=NUM_STAGES):
        slot = start + tl.arange(0, BLOCK_K)
        key = tl.load(list_at + slot)
        k = load_listed(k_corner, key, k_row_stride, D, BLOCK_D)
        # [TILE * STACK, BLOCK_K]
        s = product_in_order(q, tl.trans(k), UPCAST, PRECISION)
        s = tl.where(are_members(members_at, slot, place, capacity, WORDS), s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1) * factor)
        # Without a key so far the maximum is -inf, whose distance to itself is NaN.
        finite = tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s * factor - finite[:, None])
        rescale = tl.exp2(m - finite)
        v = load_listed(v_corner, key, v_row_stride, D, BLOCK_D)
        # [TILE * STACK, BLOCK_D]
        o = o * rescale[:, None] + product_in_order(p.to(v.dtype), v, UPCAST, PRECISION)
        l = l * rescale + tl.sum(p, 1)
        m = m_next

    inverse_l = tl.where(l == 0.0, 0.0, 1.0 / tl.where(l == 0.0, 1.0, l))
    o = o * inverse_l[:, None]
    to_row = (batch * heads + head) * queries + query
    lse = tl.where(l == 0.0, float("-inf"), (m + tl.log2(l)) * LOG_2)
    tl.store(lse_ptr + to_row, lse, mask=query < queries)
    if KEEP:
        tl.store(softmax_ptr + to_row, tl.where(l == 0.0, 0.0, m), mask=query < queries)
        tl.store(softmax_ptr + rows + to_row, inverse_l, mask=query < queries)
    to_o = (((batch * queries + query) * heads + head) * D)[:, None] + col[None, :]
    tl.store(o_ptr + to_o, o.to(o_ptr.dtype.element_ty), mask=inside)
    if HAS_WIDE:
        tl.store(o_wide_ptr + to_o, o, mask=inside)
