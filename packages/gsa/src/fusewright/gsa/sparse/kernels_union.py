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

from ..common.tiles import LOG2_E, product, zeros
from .tiles import are_members, load_listed, online_softmax, store_softmax, tile_of


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
    CONFIG: tl.constexpr,
):
    """One program computes STACK heads of TILE queries, from the query ``first`` on; ``shared``
    neighbouring heads have one head of keys.
    """
    batch, number, place, query, head, key_head = tile_of(
        first, tiles, selections, heads, shared, CONFIG
    )
    col = tl.arange(0, CONFIG.BLOCK_D)
    inside = (query < queries)[:, None] & (col < CONFIG.D)[None, :]
    to_q = batch * q_batch_stride + query * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + to_q[:, None] + col[None, :], mask=inside, other=0.0)
    k_corner = k_ptr + batch * k_batch_stride + key_head * k_head_stride
    v_corner = v_ptr + batch * v_batch_stride + key_head * v_head_stride
    list_at = list_ptr + number * capacity
    members_at = members_ptr + number * CONFIG.WORDS * capacity
    factor = scale * LOG2_E

    m = zeros(CONFIG.TILE * CONFIG.HEADS) - float("inf")
    l = zeros(CONFIG.TILE * CONFIG.HEADS)
    o = zeros(CONFIG.TILE * CONFIG.HEADS, CONFIG.BLOCK_D)
    length = tl.load(length_ptr + number)
    for start in tl.range(0, length, CONFIG.BLOCK, num_stages=CONFIG.NUM_STAGES):
        slot = start + tl.arange(0, CONFIG.BLOCK)
        key = tl.load(list_at + slot)
        k = load_listed(k_corner, key, k_row_stride, CONFIG)
        # [TILE * STACK, BLOCK_K]
        s = product(q, tl.trans(k), CONFIG)
        s = tl.where(are_members(members_at, slot, place, capacity, CONFIG), s, float("-inf"))
        m, p, rescale = online_softmax(m, s, factor)
        v = load_listed(v_corner, key, v_row_stride, CONFIG)
        # [TILE * STACK, BLOCK_D]
        o = o * rescale[:, None] + product(p.to(v.dtype), v, CONFIG)
        l = l * rescale + tl.sum(p, 1)

    inverse_l = tl.where(l == 0.0, 0.0, 1.0 / tl.where(l == 0.0, 1.0, l))
    o = o * inverse_l[:, None]
    to_row = (batch * heads + head) * queries + query
    store_softmax(lse_ptr, softmax_ptr, to_row, rows, m, l, inverse_l, query < queries)
    to_o = (((batch * queries + query) * heads + head) * CONFIG.D)[:, None] + col[None, :]
    tl.store(o_ptr + to_o, o.to(o_ptr.dtype.element_ty), mask=inside)
    if o_wide_ptr is not None:
        tl.store(o_wide_ptr + to_o, o, mask=inside)
