"""Triton kernel of the forward pass over many keys: they stream past a tile of queries.

    s_ij = scale q_i . k_j    p_ij = exp(s_ij - m_i)    l_i = sum_j p_ij
    o_i = sum_j p_ij v_j / l_i    lse_i = m_i + log l_i

The softmax is computed online: the running maximum m and sum l of each row, in base 2, and the sum
of values so far, which is rescaled whenever m grows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, length_of, load_rows, product
from ..common.tiles_forward import add_sink, next_softmax, sink_of, store_outputs
from .tiles import masked_softmax


@triton.jit
def attend(
    operands, strides, key_lengths_ptr, sinks_ptr, outputs, scale, sizes, CONFIG: tl.constexpr
):
    """BLOCK_Q rows of one head. Neighbours share the head, whose keys and values then stay in the
    L2 cache.
    """
    q_ptr, k_ptr, v_ptr = operands
    q_strides, k_strides, v_strides = strides
    o_ptr, lse_ptr, softmax_ptr, o_low_ptr = outputs
    queries, keys, heads, group, rows = sizes
    tiles = tl.cdiv(queries, CONFIG.BLOCK_Q)
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    first = tl.program_id(0) % tiles * CONFIG.BLOCK_Q
    q_source = q_ptr, q_strides[0], q_strides[1], q_strides[2], batch, head, queries
    of_keys = head // group
    k_source = k_ptr, k_strides[0], k_strides[1], k_strides[2], batch, of_keys, keys
    v_source = v_ptr, v_strides[0], v_strides[1], v_strides[2], batch, of_keys, keys
    length = length_of(key_lengths_ptr, batch, keys)
    factor = scale * LOG2_E
    q = load_rows(q_source, first, queries, CONFIG.BLOCK_Q, not CONFIG.DESCRIPTORS, CONFIG)

    # The last keys come first: only they need a mask, the loop needs none.
    last = tl.maximum(tl.cdiv(length, CONFIG.BLOCK_K) - 1, 0) * CONFIG.BLOCK_K
    k = load_rows(k_source, last, length, CONFIG.BLOCK_K, True, CONFIG)
    v = load_rows(v_source, last, length, CONFIG.BLOCK_K, True, CONFIG, True)
    # p [BLOCK_Q, BLOCK_K]; m and l [BLOCK_Q]; o [BLOCK_Q, BLOCK_V]
    p, m, l = masked_softmax(q, k, scale, last, length, CONFIG)
    o = product(p.to(v.dtype), v, CONFIG)
    for start in tl.range(0, last, CONFIG.BLOCK_K, num_stages=CONFIG.NUM_STAGES):
        k = load_rows(k_source, start, length, CONFIG.BLOCK_K, False, CONFIG)
        s = product(q, tl.trans(k), CONFIG)
        p, m, l, rescale = next_softmax(s, m, l, factor)
        v = load_rows(v_source, start, length, CONFIG.BLOCK_K, False, CONFIG, True)
        o = o * rescale[:, None] + product(p.to(v.dtype), v, CONFIG)
    if sinks_ptr is not None:
        o, m, l = add_sink(o, m, l, sink_of(sinks_ptr, head))
    of_tile = batch, head, first, queries, heads
    store_outputs(o, m, l, o_ptr, lse_ptr, softmax_ptr, o_low_ptr, of_tile, rows, CONFIG.DV)


@triton.jit
def streaming_forward_kernel(
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
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_Q rows of one head."""
    attend(
        (q_ptr, k_ptr, v_ptr),
        (
            (q_batch_stride, q_row_stride, q_head_stride),
            (k_batch_stride, k_row_stride, k_head_stride),
            (v_batch_stride, v_row_stride, v_head_stride),
        ),
        key_lengths_ptr,
        sinks_ptr,
        (o_ptr, lse_ptr, softmax_ptr, o_low_ptr),
        scale,
        (queries, keys, heads, group, rows),
        CONFIG,
    )


@triton.jit
def flagged_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    key_lengths_ptr,
    sinks_ptr,
    flags_ptr,
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
    rows,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_Q rows of one head, where their flag is set."""
    if tl.load(flags_ptr + tl.program_id(0)) != 0:
        attend(
            (q_ptr, k_ptr, v_ptr),
            (
                (q_batch_stride, q_row_stride, q_head_stride),
                (k_batch_stride, k_row_stride, k_head_stride),
                (v_batch_stride, v_row_stride, v_head_stride),
            ),
            key_lengths_ptr,
            sinks_ptr,
            (o_ptr, lse_ptr, softmax_ptr, o_low_ptr),
            scale,
            (queries, keys, heads, group, rows),
            CONFIG,
        )
