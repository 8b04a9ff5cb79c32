"""The backward pass of the rule, first half: the gradient of V' within each chunk; then the
gradients of the states, from the last chunk to the first. ``kernels_backward_inputs`` has the
gradients of the inputs, all chunks at once.

With S [K, V] the state at a chunk's start, dS' the gradient of the state at its end, T, G and L as
in ``gated_delta_rule``, W = T (beta exp(G) k) [C, K], V' = T (beta v) - W S [C, V] and
P = q k^T * L [C, C]:

    dV' = scale P^T do + (exp(G_C - G) k) dS'
    dS = exp(G_C) dS' + scale (exp(G) q)^T do - W^T dV'
    dW = -dV' S^T,  dT = dV' (beta v)^T + dW (beta exp(G) k)^T,  dA = -T^T dT T^T

dg_t sums the gradients of all decays that contain g_t: those between tokens i >= t > j in P and A,
those of S up to each token from t on, and those of S and the tokens before t up to the chunk's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand
from .tiles import (
    COUNTS,
    C,
    decay_between_transposed,
    decay_from_start,
    decay_to_end,
    last_decays,
    locate_chunk,
    locate_sequence,
    product,
    product_onto,
    store_unit_tile,
    through_memory,
    token_scalars,
    token_tile,
    unit_decays,
    unit_tile,
    zeros,
)


@triton.jit(do_not_specialize=COUNTS)
def local_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    inverses_ptr,
    states_ptr,
    decays_ptr,
    table_ptr,
    w_ptr,
    values_ptr,
    dvalues_ptr,
    scratch_ptr,
    scale,
    tokens,
    heads,
    chunks,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program recomputes W and V' of one unit and computes scale P^T do."""
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    place = locate_chunk(table_ptr, tl.program_id(0) // heads, tokens, chunks)
    do_rows = (do_ptr, do_batch_stride, do_token_stride, do_head_stride)
    q_rows = (q_ptr, q_batch_stride, q_token_stride, q_head_stride)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    v_rows = (v_ptr, v_batch_stride, v_token_stride, v_head_stride)
    row = tl.arange(0, C)
    decays = unit_decays(decays_ptr, unit, CONFIG)
    beta = token_scalars(beta_ptr, place, head, tokens, heads)
    beta_decay = beta * decay_from_start(decays, CONFIG)
    inverse = unit_tile(inverses_ptr, unit, row, row, C, C)
    weights_t = zeros(C, C)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        q = token_tile(q_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        weights_t = product_onto(weights_t, k, tl.trans(q), CONFIG)
        k = as_operand(beta_decay[:, None] * k.to(tl.float32), inverse.dtype, CONFIG.UPCAST)
        w = product(inverse, k, CONFIG)
        store_unit_tile(w_ptr, w, unit, row, key, C, CONFIG.K, CONFIG.UPCAST)
    # The same barrier orders the stores of W above before the loads of W below.
    weights_t = scale * weights_t * decay_between_transposed(decays, CONFIG)
    weights_t = through_memory(scratch_ptr, weights_t, unit, CONFIG.UPCAST)
    for start in range(0, CONFIG.V, CONFIG.BLOCK_V):
        col = start + tl.arange(0, CONFIG.BLOCK_V)
        do = token_tile(do_rows, head, place, col, CONFIG.V)
        dvalues = product(weights_t, do, CONFIG)
        store_unit_tile(dvalues_ptr, dvalues, unit, row, col, C, CONFIG.V, CONFIG.UPCAST)
        values = zeros(C, CONFIG.BLOCK_V)
        for inner in range(0, CONFIG.K, CONFIG.BLOCK_K):
            key = inner + tl.arange(0, CONFIG.BLOCK_K)
            w = unit_tile(w_ptr, unit, row, key, C, CONFIG.K)
            state = unit_tile(states_ptr, unit, key, col, CONFIG.K, CONFIG.V)
            values = product_onto(values, w, state, CONFIG)
        v = token_tile(v_rows, head, place, col, CONFIG.V)
        v = as_operand(beta[:, None] * v.to(tl.float32), inverse.dtype, CONFIG.UPCAST)
        values = product_onto(-values, inverse, v, CONFIG)
        store_unit_tile(values_ptr, values, unit, row, col, C, CONFIG.V, CONFIG.UPCAST)


@triton.jit(do_not_specialize=COUNTS)
def state_gradients_kernel(
    do_ptr,
    dend_ptr,
    q_ptr,
    k_ptr,
    w_ptr,
    decays_ptr,
    table_ptr,
    states_ptr,
    state_ptr,
    dvalues_ptr,
    dstates_ptr,
    state_products_ptr,
    dstate_ptr,
    scale,
    tokens,
    heads,
    chunks,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    CONFIG: tl.constexpr,
):
    """One program carries BLOCK_V columns of the gradient of one head's state of one sequence from
    the last chunk to the first. For each chunk it writes the gradient of the state at the chunk's
    end, that gradient times the state at the chunk's start, summed over its columns, and dV' over
    scale P^T do.
    """
    TILES: tl.constexpr = (CONFIG.V + CONFIG.BLOCK_V - 1) // CONFIG.BLOCK_V
    state_index = (tl.program_id(0) // TILES).to(tl.int64)
    head = (state_index % heads).to(tl.int32)
    sequence = (state_index // heads).to(tl.int32)
    batch, bos, length, first_chunk = locate_sequence(table_ptr, sequence, tokens, chunks)
    do_rows = (do_ptr, do_batch_stride, do_token_stride, do_head_stride)
    q_rows = (q_ptr, q_batch_stride, q_token_stride, q_head_stride)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    row = tl.arange(0, C)
    key = tl.arange(0, CONFIG.BLOCK_K)
    col = tl.program_id(0) % TILES * CONFIG.BLOCK_V + tl.arange(0, CONFIG.BLOCK_V)
    dstate = unit_tile(dend_ptr, state_index, key, col, CONFIG.K, CONFIG.V)
    if state_ptr is not None:
        initial_state = unit_tile(state_ptr, state_index, key, col, CONFIG.K, CONFIG.V)
    last = tl.cdiv(length, C) - 1
    for step in range(0, last + 1):
        chunk = last - step
        unit = (first_chunk + chunk).to(tl.int64) * heads + head
        place = (batch, bos + chunk * C, tl.minimum(length - chunk * C, C))
        q = token_tile(q_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        do = token_tile(do_rows, head, place, col, CONFIG.V)
        w = unit_tile(w_ptr, unit, row, key, C, CONFIG.K)
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, CONFIG.V)
        decays = unit_decays(decays_ptr, unit, CONFIG)
        last_token = last_decays(decays_ptr, unit, CONFIG)
        # The gradient of exp(G_C) is no product of matrices, whose operands are rounded anyway: it
        # takes dS' before it is rounded, and the initial state in fp32.
        chunk_state = unit_tile(states_ptr, unit, key, col, CONFIG.K, CONFIG.V).to(tl.float32)
        if state_ptr is not None:
            chunk_state = tl.where(chunk == 0, initial_state, chunk_state)
        at = (unit * TILES + tl.program_id(0) % TILES) * CONFIG.K + key
        tl.store(state_products_ptr + at, tl.sum(chunk_state * dstate, 1), mask=key < CONFIG.K)
        dstate_operand = as_operand(dstate, w.dtype, CONFIG.UPCAST)
        store_unit_tile(dstates_ptr, dstate_operand, unit, key, col, CONFIG.K, CONFIG.V, False)
        dnew_values = product(k, dstate_operand, CONFIG)
        to_end = decay_to_end(decays, last_token, CONFIG)[:, None]
        dnew_values = dvalues.to(tl.float32) + to_end * dnew_values
        store_unit_tile(dvalues_ptr, dnew_values, unit, row, col, C, CONFIG.V, CONFIG.UPCAST)
        scaled_do = scale * decay_from_start(decays, CONFIG)[:, None] * do.to(tl.float32)
        scaled_do = as_operand(scaled_do, w.dtype, CONFIG.UPCAST)
        dstate = product_onto(
            decay_from_start(last_token, CONFIG) * dstate, tl.trans(q), scaled_do, CONFIG
        )
        dnew_values = as_operand(-dnew_values, w.dtype, CONFIG.UPCAST)
        dstate = product_onto(dstate, tl.trans(w), dnew_values, CONFIG)
    if dstate_ptr is not None:
        store_unit_tile(
            dstate_ptr, dstate, state_index, key, col, CONFIG.K, CONFIG.V, CONFIG.UPCAST
        )
