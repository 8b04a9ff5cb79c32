"""The end of the backward pass of the rule: the gradients of the inputs, all chunks at once. What
the formulas are is in ``_backward_kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import (
    COUNTS,
    LEAST_DECAY,
    C,
    as_operand,
    between_tokens,
    decay_between,
    decay_between_turned,
    from_token_on,
    place_of_chunk,
    product,
    product_onto,
    store_token_numbers,
    store_token_tile,
    store_unit_tile,
    through_memory,
    token_numbers,
    token_tile,
    unit_tile,
)


@triton.jit(do_not_specialize=COUNTS)
def _inputs_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    values_ptr,
    dvalues_ptr,
    states_ptr,
    dstates_ptr,
    kept_ptr,
    decays_ptr,
    table_ptr,
    dq_ptr,
    dk_ptr,
    dkeys_ptr,
    dgates_ptr,
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
    SERIAL: tl.constexpr,
):
    """One program computes BLOCK_K columns of dq, of dW, and of what of dk does not come through T,
    for one unit, and their share of dg.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    unit = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) // TILES % heads
    batch, first, count = place_of_chunk(
        table_ptr, tl.program_id(0) // TILES // heads, tokens, chunks, VARLEN
    )
    row = tl.arange(0, C)
    key = tl.program_id(0) % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    decay = tl.load(decays_ptr + unit * C + row)
    whole = tl.load(decays_ptr + unit * C + C - 1)
    q = token_tile(
        q_ptr, q_batch_stride, q_token_stride, q_head_stride,
        batch, head // GROUP, first, count, key, K,
    )  # fmt: skip
    k = token_tile(
        k_ptr, k_batch_stride, k_token_stride, k_head_stride,
        batch, head // GROUP, first, count, key, K,
    )  # fmt: skip

    # Two walks over the values, since all five sums at once do not fit into registers.
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    dkeys = tl.zeros([C, BLOCK_K], tl.float32)
    weights = tl.zeros([C, C], tl.float32)
    for start in range(0, V, BLOCK_V):
        col = start + tl.arange(0, BLOCK_V)
        do = token_tile(
            do_ptr, do_batch_stride, do_token_stride, do_head_stride,
            batch, head, first, count, col, V,
        )  # fmt: skip
        values = unit_tile(values_ptr, unit, row, col, C, V)
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, V)
        state = tl.trans(unit_tile(states_ptr, unit, key, col, K, V))
        dq = product_onto(dq, do, state, UPCAST, PRECISION)
        dkeys = product_onto(dkeys, dvalues, state, UPCAST, PRECISION)
        weights = product_onto(weights, do, tl.trans(values), UPCAST, PRECISION)
    store_unit_tile(dkeys_ptr, -dkeys, unit, row, key, C, K, UPCAST)
    weights = scale * weights * decay_between(decay)
    matches = product(q, tl.trans(k), UPCAST, PRECISION)
    pairs = tl.where(row[:, None] > row[None, :], weights * matches, 0.0)
    dgate = between_tokens(pairs)
    dq *= scale * tl.exp(decay)[:, None]
    dgate += from_token_on(tl.sum(dq * q.to(tl.float32), 1))
    weights = as_operand(weights, q.dtype, UPCAST)
    dq = product_onto(dq, weights, k, UPCAST, PRECISION)
    store_token_tile(dq_ptr, dq, batch, head, first, count, tokens, heads, key, K, UPCAST)

    dk = tl.zeros([C, BLOCK_K], tl.float32)
    weights = tl.zeros([C, C], tl.float32)
    for start in range(0, V, BLOCK_V):
        col = start + tl.arange(0, BLOCK_V)
        do = token_tile(
            do_ptr, do_batch_stride, do_token_stride, do_head_stride,
            batch, head, first, count, col, V,
        )  # fmt: skip
        values = unit_tile(values_ptr, unit, row, col, C, V)
        dstate = unit_tile(dstates_ptr, unit, key, col, K, V)
        dk = product_onto(dk, values, tl.trans(dstate), UPCAST, PRECISION)
        # Not the transpose of the former: what a product has made is not turned.
        weights = product_onto(weights, values, tl.trans(do), UPCAST, PRECISION)
    dk *= tl.exp(whole - decay)[:, None]
    left = tl.sum(dk * k.to(tl.float32), 1)
    kept = tl.zeros([BLOCK_K], tl.float32)
    for tile in tl.static_range(SERIAL):
        at = (unit * SERIAL + tile) * K + key
        kept += tl.load(kept_ptr + at, mask=key < K, other=0.0)
    # What is left of a token, and of the state, decays with every g that follows.
    dgate += tl.cumsum(left, 0) - left + tl.exp(whole) * tl.sum(kept, 0)
    weights = as_operand(scale * weights * decay_between_turned(decay), q.dtype, UPCAST)
    dk = product_onto(dk, weights, q, UPCAST, PRECISION)
    store_unit_tile(dk_ptr, dk, unit, row, key, C, K, UPCAST)
    share = unit * TILES + tl.program_id(0) % TILES
    tl.store(dgates_ptr + share * C + row, dgate)


@triton.jit(do_not_specialize=COUNTS)
def _through_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    inverses_ptr,
    dvalues_ptr,
    dkeys_ptr,
    decays_ptr,
    dgates_ptr,
    table_ptr,
    other_dk_ptr,
    squares_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
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
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARES: tl.constexpr,
):
    """One program goes, for one unit, through T: dv, dbeta, dg, and dk with what is known of it."""
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    batch, first, count = place_of_chunk(
        table_ptr, tl.program_id(0) // heads, tokens, chunks, VARLEN
    )
    row = tl.arange(0, C)
    decay = tl.load(decays_ptr + unit * C + row)
    beta = token_numbers(beta_ptr, batch, head, first, count, tokens, heads)
    since = tl.exp(decay)
    found = unit_tile(inverses_ptr, unit, row, row, C, C)
    dbeta = tl.zeros([C], tl.float32)
    dfound = tl.zeros([C, C], tl.float32)
    for start in range(0, V, BLOCK_V):
        col = start + tl.arange(0, BLOCK_V)
        v = token_tile(
            v_ptr, v_batch_stride, v_token_stride, v_head_stride,
            batch, head, first, count, col, V,
        ).to(tl.float32)  # fmt: skip
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, V)
        weighed = as_operand(beta[:, None] * v, found.dtype, UPCAST)
        dfound = product_onto(dfound, dvalues, tl.trans(weighed), UPCAST, PRECISION)
        dv = product(tl.trans(found), dvalues, UPCAST, PRECISION)
        dbeta += tl.sum(dv * v, 1)
        dv *= beta[:, None]
        store_token_tile(dv_ptr, dv, batch, head, first, count, tokens, heads, col, V, UPCAST)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        dkeys = unit_tile(dkeys_ptr, unit, row, key, C, K)
        weighed = (beta * since)[:, None] * k.to(tl.float32)
        weighed = as_operand(weighed, found.dtype, UPCAST)
        dfound = product_onto(dfound, dkeys, tl.trans(weighed), UPCAST, PRECISION)

    # dA = -T^T dT T^T, as a gradient of k k^T, but for beta of the later token.
    dfound = as_operand(dfound, found.dtype, UPCAST)
    da = product(tl.trans(found), dfound, UPCAST, PRECISION)
    da = as_operand(da, found.dtype, UPCAST)
    da = product(da, tl.trans(found), UPCAST, PRECISION)
    da = tl.where(row[:, None] > row[None, :], -da * decay_between(decay), 0.0)
    through_memory(squares_ptr, beta[:, None] * da, unit, UPCAST)
    matches = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        matches = product_onto(matches, k, tl.trans(k), UPCAST, PRECISION)
    matches *= da
    dbeta += tl.sum(matches, 1)
    dgate = between_tokens(beta[:, None] * matches)

    for share in tl.static_range(SHARES):
        dgate += tl.load(dgates_ptr + (unit * SHARES + share) * C + row)
    slope = tl.zeros([C], tl.float32)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        dkeys = unit_tile(dkeys_ptr, unit, row, key, C, K)
        # Loaded again, or they would fill the registers all along.
        found = unit_tile(inverses_ptr, unit, row, row, C, C)
        weighed = unit_tile(squares_ptr, unit, row, row, C, C)
        through = since[:, None] * product(tl.trans(found), dkeys, UPCAST, PRECISION)
        slope += tl.sum(through * k.to(tl.float32), 1)
        dk = unit_tile(other_dk_ptr, unit, row, key, C, K) + beta[:, None] * through
        dk = product_onto(dk, weighed, k, UPCAST, PRECISION)
        dk = product_onto(dk, tl.trans(weighed), k, UPCAST, PRECISION)
        store_token_tile(dk_ptr, dk, batch, head, first, count, tokens, heads, key, K, UPCAST)
    dbeta += slope
    dgate += from_token_on(beta * slope)
    g = token_numbers(g_ptr, batch, head, first, count, tokens, heads)
    dgate = tl.where(g < LEAST_DECAY, 0.0, dgate)
    store_token_numbers(dg_ptr, dgate, batch, head, first, count, tokens, heads)
    store_token_numbers(dbeta_ptr, dbeta, batch, head, first, count, tokens, heads)
