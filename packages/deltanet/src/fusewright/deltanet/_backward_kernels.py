"""The backward pass of the rule: what a chunk's own outputs say; then the gradients of the states,
from the last chunk to the first; then those of the inputs, all chunks at once.

With S the state with which a chunk began, W = T (beta exp(G) k), V' = T (beta v) - W S,
P = q k^T * L and dS' the gradient of the state with which it ended:

    dV' = scale P^T do + (exp(G_C - G) k) dS'
    dS = exp(G_C) dS' + scale (exp(G) q)^T do - W^T dV'
    dW = -dV' S^T,  dT = dV' (beta v)^T + dW (beta exp(G) k)^T,  dA = -T^T dT T^T

dg_t is what all terms say that decay over t: a pair of tokens i >= t > j through P and A, what is
read from t on of S, and what is left at the end of S and of tokens before t.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import (
    COUNTS,
    C,
    as_operand,
    decay_between_turned,
    place_of_chunk,
    place_of_sequence,
    product,
    product_onto,
    store_unit_tile,
    through_memory,
    token_numbers,
    token_tile,
    unit_tile,
)


@triton.jit(do_not_specialize=COUNTS)
def _local_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    inverses_ptr,
    states_ptr,
    decays_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    dvalues_ptr,
    squares_ptr,
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
    VARLEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program computes, of one unit, W and V' again, and scale P^T do."""
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    batch, first, count = place_of_chunk(
        table_ptr, tl.program_id(0) // heads, tokens, chunks, VARLEN
    )
    row = tl.arange(0, C)
    decay = tl.load(decays_ptr + unit * C + row)
    beta = token_numbers(beta_ptr, batch, head, first, count, tokens, heads)
    since = beta * tl.exp(decay)
    found = unit_tile(inverses_ptr, unit, row, row, C, C)
    turned = tl.zeros([C, C], tl.float32)
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
        turned = product_onto(turned, k, tl.trans(q), UPCAST, PRECISION)
        k = as_operand(since[:, None] * k.to(tl.float32), found.dtype, UPCAST)
        keys = product(found, k, UPCAST, PRECISION)
        store_unit_tile(keys_ptr, keys, unit, row, key, C, K, UPCAST)
    # The stores of W above, which are read below, are behind the same barrier.
    turned = scale * turned * decay_between_turned(decay)
    turned = through_memory(squares_ptr, turned, unit, UPCAST)
    for start in range(0, V, BLOCK_V):
        col = start + tl.arange(0, BLOCK_V)
        do = token_tile(
            do_ptr, do_batch_stride, do_token_stride, do_head_stride,
            batch, head, first, count, col, V,
        )  # fmt: skip
        dvalues = product(turned, do, UPCAST, PRECISION)
        store_unit_tile(dvalues_ptr, dvalues, unit, row, col, C, V, UPCAST)
        values = tl.zeros([C, BLOCK_V], tl.float32)
        for inner in range(0, K, BLOCK_K):
            key = inner + tl.arange(0, BLOCK_K)
            keys = unit_tile(keys_ptr, unit, row, key, C, K)
            state = unit_tile(states_ptr, unit, key, col, K, V)
            values = product_onto(values, keys, state, UPCAST, PRECISION)
        v = token_tile(
            v_ptr, v_batch_stride, v_token_stride, v_head_stride,
            batch, head, first, count, col, V,
        )  # fmt: skip
        v = as_operand(beta[:, None] * v.to(tl.float32), found.dtype, UPCAST)
        values = product_onto(-values, found, v, UPCAST, PRECISION)
        store_unit_tile(values_ptr, values, unit, row, col, C, V, UPCAST)


@triton.jit(do_not_specialize=COUNTS)
def _state_gradients_kernel(
    do_ptr,
    dend_ptr,
    q_ptr,
    k_ptr,
    keys_ptr,
    decays_ptr,
    table_ptr,
    states_ptr,
    state_ptr,
    dvalues_ptr,
    dstates_ptr,
    kept_ptr,
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
    VARLEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program carries BLOCK_V columns of the gradient of the state of one head of one sequence
    from the last chunk to the first: it writes that of the state with which each ended, its
    products with what the state began with, summed over the columns, and dV' in the place of what
    is known of it.
    """
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    own = (tl.program_id(0) // TILES).to(tl.int64)
    head = (own % heads).to(tl.int32)
    sequence = (own // heads).to(tl.int32)
    batch, bos, length, first_chunk = place_of_sequence(table_ptr, sequence, tokens, chunks, VARLEN)
    row = tl.arange(0, C)
    key = tl.arange(0, BLOCK_K)
    col = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    dstate = unit_tile(dend_ptr, own, key, col, K, V)
    if state_ptr is not None:
        start = unit_tile(state_ptr, own, key, col, K, V)
    last = tl.cdiv(length, C) - 1
    for step in range(0, last + 1):
        chunk = last - step
        unit = (first_chunk + chunk).to(tl.int64) * heads + head
        count = tl.minimum(length - chunk * C, C)
        q = token_tile(
            q_ptr, q_batch_stride, q_token_stride, q_head_stride,
            batch, head // GROUP, bos + chunk * C, count, key, K,
        )  # fmt: skip
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, bos + chunk * C, count, key, K,
        )  # fmt: skip
        do = token_tile(
            do_ptr, do_batch_stride, do_token_stride, do_head_stride,
            batch, head, bos + chunk * C, count, col, V,
        )  # fmt: skip
        keys = unit_tile(keys_ptr, unit, row, key, C, K)
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, V)
        decay = tl.load(decays_ptr + unit * C + row)
        whole = tl.load(decays_ptr + unit * C + C - 1)
        # With dS' before it is rounded, and the first state as it was given: the decay of what is
        # kept is no product of matrices, whose operands are rounded anyway.
        began = unit_tile(states_ptr, unit, key, col, K, V).to(tl.float32)
        if state_ptr is not None:
            began = tl.where(chunk == 0, start, began)
        at = (unit * TILES + tl.program_id(0) % TILES) * K + key
        tl.store(kept_ptr + at, tl.sum(began * dstate, 1), mask=key < K)
        ended = as_operand(dstate, keys.dtype, UPCAST)
        store_unit_tile(dstates_ptr, ended, unit, key, col, K, V, False)
        left = product(k, ended, UPCAST, PRECISION)
        left = dvalues.to(tl.float32) + tl.exp(whole - decay)[:, None] * left
        store_unit_tile(dvalues_ptr, left, unit, row, col, C, V, UPCAST)
        read = scale * tl.exp(decay)[:, None] * do.to(tl.float32)
        read = as_operand(read, keys.dtype, UPCAST)
        dstate = product_onto(tl.exp(whole) * dstate, tl.trans(q), read, UPCAST, PRECISION)
        left = as_operand(-left, keys.dtype, UPCAST)
        dstate = product_onto(dstate, tl.trans(keys), left, UPCAST, PRECISION)
    if dstate_ptr is not None:
        store_unit_tile(dstate_ptr, dstate, own, key, col, K, V, UPCAST)
