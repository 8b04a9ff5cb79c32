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
    LEAST_DECAY,
    C,
    decay_between,
    locate_chunk,
    locate_sequence,
    product,
    product_onto,
    store_token_tile,
    store_unit_tile,
    through_memory,
    token_scalars,
    token_tile,
    unit_tile,
    unit_triangular_inverse,
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
    VARLEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program computes, for one unit, G, T = (I + A)^-1, W and T (beta v)."""
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    batch, first, count = locate_chunk(table_ptr, tl.program_id(0) // heads, tokens, chunks, VARLEN)
    row = tl.arange(0, C)
    g = token_scalars(g_ptr, batch, head, first, count, tokens, heads)
    beta = token_scalars(beta_ptr, batch, head, first, count, tokens, heads)
    decay = tl.cumsum(tl.where(g < LEAST_DECAY, LEAST_DECAY, g), 0)
    tl.store(decays_ptr + unit * C + row, decay)

    a = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, col, K,
        )  # fmt: skip
        a = product_onto(a, k, tl.trans(k), UPCAST, PRECISION)
    a = tl.where(row[:, None] > row[None, :], beta[:, None] * a * decay_between(decay), 0.0)
    inverse = through_memory(inverses_ptr, unit_triangular_inverse(a, INVERSE), unit, UPCAST)

    for start in range(0, V, BLOCK_V):
        col = start + tl.arange(0, BLOCK_V)
        v = token_tile(
            v_ptr, v_batch_stride, v_token_stride, v_head_stride,
            batch, head, first, count, col, V,
        )  # fmt: skip
        v = as_operand(beta[:, None] * v.to(tl.float32), k_ptr.dtype.element_ty, UPCAST)
        values = product(inverse, v, UPCAST, PRECISION)
        store_unit_tile(values_ptr, values, unit, row, col, C, V, UPCAST)
    beta_decay = beta * tl.exp(decay)
    for start in range(0, K, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, col, K,
        )  # fmt: skip
        k = as_operand(beta_decay[:, None] * k.to(tl.float32), k_ptr.dtype.element_ty, UPCAST)
        w = product(inverse, k, UPCAST, PRECISION)
        store_unit_tile(w_ptr, w, unit, row, col, C, K, UPCAST)


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
    VARLEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program carries BLOCK_V columns of one head's state of one sequence over all chunks. It
    writes the state at each chunk's start, and V' over T (beta v).
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    state_index = (tl.program_id(0) // TILES).to(tl.int64)
    head = (state_index % heads).to(tl.int32)
    sequence = (state_index // heads).to(tl.int32)
    batch, bos, length, first_chunk = locate_sequence(table_ptr, sequence, tokens, chunks, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BLOCK_K)
    col = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    if state_ptr is not None:
        state = unit_tile(state_ptr, state_index, key, col, K, V)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for chunk in range(0, tl.cdiv(length, C)):
        unit = (first_chunk + chunk).to(tl.int64) * heads + head
        count = tl.minimum(length - chunk * C, C)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, bos + chunk * C, count, key, K,
        )  # fmt: skip
        w = unit_tile(w_ptr, unit, row, key, C, K)
        values = unit_tile(values_ptr, unit, row, col, C, V)
        decay = tl.load(decays_ptr + unit * C + row)
        last_decay = tl.load(decays_ptr + unit * C + C - 1)
        start_state = as_operand(state, w.dtype, UPCAST)
        store_unit_tile(states_ptr, start_state, unit, key, col, K, V, False)
        new_values = values.to(tl.float32) - product(w, start_state, UPCAST, PRECISION)
        store_unit_tile(values_ptr, new_values, unit, row, col, C, V, UPCAST)
        new_values = as_operand(tl.exp(last_decay - decay)[:, None] * new_values, w.dtype, UPCAST)
        state = product_onto(tl.exp(last_decay) * state, tl.trans(k), new_values, UPCAST, PRECISION)
    store_unit_tile(end_ptr, state, state_index, key, col, K, V, UPCAST)


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
    VARLEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program computes BLOCK_V columns of the outputs of one unit."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    unit = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) // TILES % heads
    batch, first, count = locate_chunk(
        table_ptr, tl.program_id(0) // TILES // heads, tokens, chunks, VARLEN
    )
    row = tl.arange(0, C)
    col = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    o = tl.zeros([C, BLOCK_V], tl.float32)
    weights = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        q = token_tile(
            q_ptr, q_batch_stride, q_token_stride, q_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        state = unit_tile(states_ptr, unit, key, col, K, V)
        o = product_onto(o, q, state, UPCAST, PRECISION)
        weights = product_onto(weights, q, tl.trans(k), UPCAST, PRECISION)
    decay = tl.load(decays_ptr + unit * C + row)
    values = unit_tile(values_ptr, unit, row, col, C, V)
    weights = as_operand(weights * decay_between(decay), values.dtype, UPCAST)
    o = product_onto(tl.exp(decay)[:, None] * o, weights, values, UPCAST, PRECISION)
    store_token_tile(o_ptr, scale * o, batch, head, first, count, tokens, heads, col, V, UPCAST)
