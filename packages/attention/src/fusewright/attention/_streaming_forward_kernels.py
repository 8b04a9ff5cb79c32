"""Triton kernel of the forward pass over many keys: they stream past a tile of queries.

The softmax is computed online: the running maximum m and sum l of each row, in base 2, and the sum
of values so far, which is rescaled whenever m grows.

Milakov and Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import LOG2_E, LOG_2, length_of, load_rows, masked_softmax, product, store_rows


@triton.jit
def next_softmax(s, m, l, factor):
    """exp(s - m) of the next tile of scores, the maximum m and the sum l with it, and by how much
    everything before shrinks.
    """
    m_next = tl.maximum(m, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - m_next[:, None])
    rescale = tl.exp2(m - m_next)
    return p, m_next, l * rescale + tl.sum(p, 1), rescale


@triton.jit
def store_outputs(
    o,
    m,
    l,
    o_ptr,
    lse_ptr,
    softmax_ptr,
    rest_ptr,
    batch,
    head,
    first,
    queries,
    heads,
    rows,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_LSE: tl.constexpr,
    HAS_SOFTMAX: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Divide o by its row's sum and write it, and of the statistics what is asked for."""
    row = first + tl.arange(0, BLOCK_Q)
    at = (batch * heads + head).to(tl.int64) * queries + row
    # Only a task without keys has a sum of zero.
    share = 1.0 / tl.where(l == 0.0, 1.0, l)
    if HAS_SOFTMAX:
        tl.store(softmax_ptr + at, m, mask=row < queries)
        tl.store(softmax_ptr + rows + at, share, mask=row < queries)
    if WITH_LSE:
        tl.store(lse_ptr + at, (m + tl.log2(l)) * LOG_2, mask=row < queries)
    o = o * share[:, None]
    store_rows(o_ptr, o, batch, head, first, queries, heads, D, BLOCK_Q, BLOCK_D)
    if HAS_REST:
        # What rounding takes from o, for the delta of the backward pass.
        rest = o - o.to(o_ptr.dtype.element_ty).to(tl.float32)
        store_rows(rest_ptr, rest, batch, head, first, queries, heads, D, BLOCK_Q, BLOCK_D)


@triton.jit
def _streaming_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    key_lengths_ptr,
    o_ptr,
    lse_ptr,
    softmax_ptr,
    rest_ptr,
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
    rows,
    D: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    WITH_LSE: tl.constexpr,
    HAS_SOFTMAX: tl.constexpr,
    HAS_REST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes BLOCK_Q rows of one head. Neighbours share the head, whose keys and
    values then stay in the L2 cache.
    """
    tiles = tl.cdiv(queries, BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    first = tl.program_id(0) % tiles * BLOCK_Q
    q_source = q_ptr, q_batch_stride, q_row_stride, q_head_stride, batch, head, queries
    k_source = k_ptr, k_batch_stride, k_row_stride, k_head_stride, batch, head, keys
    v_source = v_ptr, v_batch_stride, v_row_stride, v_head_stride, batch, head, keys
    length = length_of(key_lengths_ptr, batch, keys, HAS_LENGTHS)
    factor = scale * LOG2_E
    q = load_rows(q_source, first, queries, BLOCK_Q, not DESCRIPTORS, D, BLOCK_D, DESCRIPTORS)

    # The last keys come first: they alone need a mask, and the loop none.
    last = tl.maximum(tl.cdiv(length, BLOCK_K) - 1, 0) * BLOCK_K
    k = load_rows(k_source, last, length, BLOCK_K, True, D, BLOCK_D, DESCRIPTORS)
    v = load_rows(v_source, last, length, BLOCK_K, True, D, BLOCK_D, DESCRIPTORS)
    p, m, l = masked_softmax(q, k, scale, last, length, BLOCK_K, UPCAST, PRECISION)
    o = product(p.to(v.dtype), v, UPCAST, PRECISION)
    for start in tl.range(0, last, BLOCK_K, num_stages=NUM_STAGES):
        k = load_rows(k_source, start, length, BLOCK_K, False, D, BLOCK_D, DESCRIPTORS)
        s = product(q, tl.trans(k), UPCAST, PRECISION)
        p, m, l, rescale = next_softmax(s, m, l, factor)
        v = load_rows(v_source, start, length, BLOCK_K, False, D, BLOCK_D, DESCRIPTORS)
        o = o * rescale[:, None] + product(p.to(v.dtype), v, UPCAST, PRECISION)
    store_outputs(
        *(o, m, l, o_ptr, lse_ptr, softmax_ptr, rest_ptr),
        *(batch, head, first, queries, heads, rows),
        *(D, BLOCK_Q, BLOCK_D, WITH_LSE, HAS_SOFTMAX, HAS_REST),
    )
