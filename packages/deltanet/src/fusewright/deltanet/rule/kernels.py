"""The forward pass of the rule: within each chunk; then the states, from chunk to chunk; then all
outputs at once. With T, G and L as in ``gated_delta_rule`` and S [K, V] the state at a chunk's
start:

    W = T (beta exp(G) k),  V' = T (beta v) - W S
    S <- exp(G_C) S + (exp(G_C - G) k)^T V'
    o = scale ((exp(G) q) S + (q k^T * L) V')
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand
from .tiles import (
    COUNTS,
    C,
    cumulated,
    decay_between,
    decay_from_start,
    decay_to_end,
    last_decays,
    locate_chunk,
    locate_sequence,
    product,
    product_onto,
    store_decays,
    store_token_tile,
    store_unit_tile,
    through_memory,
    token_scalars,
    token_tile,
    unit_decays,
    unit_tile,
    unit_triangular_inverse,
    zeros,
)


@triton.jit(do_not_specialize=COUNTS)
def prepare_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    table_ptr,
    w_ptr,
    values_ptr,
    inverses_ptr,
    decays_ptr,
    tokens,
    heads,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes, for one unit, G, T = (I + A)^-1, W and T (beta v)."""
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    place = locate_chunk(table_ptr, tl.program_id(0) // heads, tokens, chunks)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    v_rows = (v_ptr, v_batch_stride, v_token_stride, v_head_stride)
    row = tl.arange(0, C)
    g = token_scalars(g_ptr, place, head, tokens, heads)
    beta = token_scalars(beta_ptr, place, head, tokens, heads)
    decays = cumulated(g, CONFIG)
    store_decays(decays_ptr, decays, unit, CONFIG)

    a = zeros(C, C)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        col = start + tl.arange(0, CONFIG.BLOCK_K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, col, CONFIG.K)
        a = product_onto(a, k, tl.trans(k), CONFIG)
    a = tl.where(
        row[:, None] > row[None, :], beta[:, None] * a * decay_between(decays, CONFIG), 0.0
    )
    inverse = through_memory(inverses_ptr, unit_triangular_inverse(a, CONFIG), unit, CONFIG.UPCAST)

    for start in range(0, CONFIG.V, CONFIG.BLOCK_V):
        col = start + tl.arange(0, CONFIG.BLOCK_V)
        v = token_tile(v_rows, head, place, col, CONFIG.V)
        v = as_operand(beta[:, None] * v.to(tl.float32), k_ptr.dtype.element_ty, CONFIG.UPCAST)
        values = product(inverse, v, CONFIG)
        store_unit_tile(values_ptr, values, unit, row, col, C, CONFIG.V, CONFIG.UPCAST)
    beta_decay = beta * decay_from_start(decays, CONFIG)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        col = start + tl.arange(0, CONFIG.BLOCK_K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, col, CONFIG.K)
        k = as_operand(
            beta_decay[:, None] * k.to(tl.float32), k_ptr.dtype.element_ty, CONFIG.UPCAST
        )
        w = product(inverse, k, CONFIG)
        store_unit_tile(w_ptr, w, unit, row, col, C, CONFIG.K, CONFIG.UPCAST)


@triton.jit(do_not_specialize=COUNTS)
def states_kernel(
    k_ptr,
    w_ptr,
    values_ptr,
    decays_ptr,
    state_ptr,
    table_ptr,
    states_ptr,
    end_ptr,
    tokens,
    heads,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    CONFIG: tl.constexpr,
):
    """One program carries BLOCK_V columns of one head's state of one sequence over all chunks. It
    writes the state at each chunk's start, and V' over T (beta v).
    """
    TILES: tl.constexpr = (CONFIG.V + CONFIG.BLOCK_V - 1) // CONFIG.BLOCK_V
    state_index = (tl.program_id(0) // TILES).to(tl.int64)
    head = (state_index % heads).to(tl.int32)
    sequence = (state_index // heads).to(tl.int32)
    batch, bos, length, first_chunk = locate_sequence(table_ptr, sequence, tokens, chunks)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    row = tl.arange(0, C)
    key = tl.arange(0, CONFIG.BLOCK_K)
    col = tl.program_id(0) % TILES * CONFIG.BLOCK_V + tl.arange(0, CONFIG.BLOCK_V)
    if state_ptr is not None:
        state = unit_tile(state_ptr, state_index, key, col, CONFIG.K, CONFIG.V)
    else:
        state = zeros(CONFIG.BLOCK_K, CONFIG.BLOCK_V)
    for chunk in range(0, tl.cdiv(length, C)):
        unit = (first_chunk + chunk).to(tl.int64) * heads + head
        place = (batch, bos + chunk * C, tl.minimum(length - chunk * C, C))
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        w = unit_tile(w_ptr, unit, row, key, C, CONFIG.K)
        values = unit_tile(values_ptr, unit, row, col, C, CONFIG.V)
        decays = unit_decays(decays_ptr, unit, CONFIG)
        last = last_decays(decays_ptr, unit, CONFIG)
        start_state = as_operand(state, w.dtype, CONFIG.UPCAST)
        store_unit_tile(states_ptr, start_state, unit, key, col, CONFIG.K, CONFIG.V, False)
        new_values = values.to(tl.float32) - product(w, start_state, CONFIG)
        store_unit_tile(values_ptr, new_values, unit, row, col, C, CONFIG.V, CONFIG.UPCAST)
        new_values = as_operand(
            decay_to_end(decays, last, CONFIG)[:, None] * new_values, w.dtype, CONFIG.UPCAST
        )
        state = product_onto(
            decay_from_start(last, CONFIG) * state, tl.trans(k), new_values, CONFIG
        )
    store_unit_tile(end_ptr, state, state_index, key, col, CONFIG.K, CONFIG.V, CONFIG.UPCAST)


@triton.jit(do_not_specialize=COUNTS)
def outputs_kernel(
    q_ptr,
    k_ptr,
    values_ptr,
    states_ptr,
    decays_ptr,
    table_ptr,
    o_ptr,
    scale,
    tokens,
    heads,
    chunks,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_V columns of the outputs of one unit."""
    TILES: tl.constexpr = (CONFIG.V + CONFIG.BLOCK_V - 1) // CONFIG.BLOCK_V
    unit = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) // TILES % heads
    place = locate_chunk(table_ptr, tl.program_id(0) // TILES // heads, tokens, chunks)
    q_rows = (q_ptr, q_batch_stride, q_token_stride, q_head_stride)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    row = tl.arange(0, C)
    col = tl.program_id(0) % TILES * CONFIG.BLOCK_V + tl.arange(0, CONFIG.BLOCK_V)
    o = zeros(C, CONFIG.BLOCK_V)
    weights = zeros(C, C)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        q = token_tile(q_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        state = unit_tile(states_ptr, unit, key, col, CONFIG.K, CONFIG.V)
        o = product_onto(o, q, state, CONFIG)
        weights = product_onto(weights, q, tl.trans(k), CONFIG)
    decays = unit_decays(decays_ptr, unit, CONFIG)
    values = unit_tile(values_ptr, unit, row, col, C, CONFIG.V)
    weights = as_operand(weights * decay_between(decays, CONFIG), values.dtype, CONFIG.UPCAST)
    o = product_onto(decay_from_start(decays, CONFIG)[:, None] * o, weights, values, CONFIG)
    store_token_tile(o_ptr, scale * o, place, head, tokens, heads, col, CONFIG.V, CONFIG.UPCAST)
