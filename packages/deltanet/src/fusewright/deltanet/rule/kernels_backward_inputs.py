"""The backward pass of the rule, second half: the gradients of the inputs, all chunks at once. The
formulas are in ``kernels_backward``.
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
    decay_between_transposed,
    locate_chunk,
    product,
    product_onto,
    store_token_scalars,
    store_token_tile,
    store_unit_tile,
    sum_between_tokens,
    sum_from_token_on,
    through_memory,
    token_scalars,
    token_tile,
    unit_tile,
)


@triton.jit(do_not_specialize=COUNTS)
def inputs_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    values_ptr,
    dvalues_ptr,
    states_ptr,
    dstates_ptr,
    state_products_ptr,
    decays_ptr,
    table_ptr,
    dq_ptr,
    partial_dk_ptr,
    dw_ptr,
    partial_dgates_ptr,
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
    VALUE_TILES: tl.constexpr,
):
    """One program computes, for one unit, BLOCK_K columns of dq, of dW and of the part of dk that
    does not go through T, and its partial sum of dg.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    unit = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) // TILES % heads
    batch, first, count = locate_chunk(
        table_ptr, tl.program_id(0) // TILES // heads, tokens, chunks, VARLEN
    )
    row = tl.arange(0, C)
    key = tl.program_id(0) % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    decay = tl.load(decays_ptr + unit * C + row)
    last_decay = tl.load(decays_ptr + unit * C + C - 1)
    q = token_tile(
        q_ptr, q_batch_stride, q_token_stride, q_head_stride,
        batch, head // GROUP, first, count, key, K,
    )  # fmt: skip
    k = token_tile(
        k_ptr, k_batch_stride, k_token_stride, k_head_stride,
        batch, head // GROUP, first, count, key, K,
    )  # fmt: skip

    # Two loops over the values: all five sums at once do not fit into registers.
    dq = tl.zeros([C, BLOCK_K], tl.float32)
    dw = tl.zeros([C, BLOCK_K], tl.float32)
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
        dw = product_onto(dw, dvalues, state, UPCAST, PRECISION)
        weights = product_onto(weights, do, tl.trans(values), UPCAST, PRECISION)
    store_unit_tile(dw_ptr, -dw, unit, row, key, C, K, UPCAST)
    weights = scale * weights * decay_between(decay)
    qk = product(q, tl.trans(k), UPCAST, PRECISION)
    pairs = tl.where(row[:, None] > row[None, :], weights * qk, 0.0)
    dgate = sum_between_tokens(pairs)
    dq *= scale * tl.exp(decay)[:, None]
    dgate += sum_from_token_on(tl.sum(dq * q.to(tl.float32), 1))
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
        # Recomputed and not the transpose of the one above: no product is transposed.
        weights = product_onto(weights, values, tl.trans(do), UPCAST, PRECISION)
    dk *= tl.exp(last_decay - decay)[:, None]
    key_products = tl.sum(dk * k.to(tl.float32), 1)
    products = tl.zeros([BLOCK_K], tl.float32)
    for tile in tl.static_range(VALUE_TILES):
        at = (unit * VALUE_TILES + tile) * K + key
        products += tl.load(state_products_ptr + at, mask=key < K, other=0.0)
    # A token's own part, and the state, decay with each g that follows.
    dgate += tl.cumsum(key_products, 0) - key_products + tl.exp(last_decay) * tl.sum(products, 0)
    weights = as_operand(scale * weights * decay_between_transposed(decay), q.dtype, UPCAST)
    dk = product_onto(dk, weights, q, UPCAST, PRECISION)
    store_unit_tile(partial_dk_ptr, dk, unit, row, key, C, K, UPCAST)
    tile = unit * TILES + tl.program_id(0) % TILES
    tl.store(partial_dgates_ptr + tile * C + row, dgate)


@triton.jit(do_not_specialize=COUNTS)
def through_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    inverses_ptr,
    dvalues_ptr,
    dw_ptr,
    decays_ptr,
    partial_dgates_ptr,
    table_ptr,
    partial_dk_ptr,
    scratch_ptr,
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
    KEY_TILES: tl.constexpr,
):
    """One program computes, for one unit, the gradients that go through T: dv, dbeta, the
    remaining parts of dk and dg.
    """
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    batch, first, count = locate_chunk(table_ptr, tl.program_id(0) // heads, tokens, chunks, VARLEN)
    row = tl.arange(0, C)
    decay = tl.load(decays_ptr + unit * C + row)
    beta = token_scalars(beta_ptr, batch, head, first, count, tokens, heads)
    exp_decay = tl.exp(decay)
    inverse = unit_tile(inverses_ptr, unit, row, row, C, C)
    dbeta = tl.zeros([C], tl.float32)
    dinverse = tl.zeros([C, C], tl.float32)
    for start in range(0, V, BLOCK_V):
        col = start + tl.arange(0, BLOCK_V)
        v = token_tile(
            v_ptr, v_batch_stride, v_token_stride, v_head_stride,
            batch, head, first, count, col, V,
        ).to(tl.float32)  # fmt: skip
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, V)
        weighted = as_operand(beta[:, None] * v, inverse.dtype, UPCAST)
        dinverse = product_onto(dinverse, dvalues, tl.trans(weighted), UPCAST, PRECISION)
        dv = product(tl.trans(inverse), dvalues, UPCAST, PRECISION)
        dbeta += tl.sum(dv * v, 1)
        dv *= beta[:, None]
        store_token_tile(dv_ptr, dv, batch, head, first, count, tokens, heads, col, V, UPCAST)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        dw = unit_tile(dw_ptr, unit, row, key, C, K)
        weighted = (beta * exp_decay)[:, None] * k.to(tl.float32)
        weighted = as_operand(weighted, inverse.dtype, UPCAST)
        dinverse = product_onto(dinverse, dw, tl.trans(weighted), UPCAST, PRECISION)

    # dA = -T^T dT T^T, as a gradient of k k^T, still without beta of the later token.
    dinverse = as_operand(dinverse, inverse.dtype, UPCAST)
    da = product(tl.trans(inverse), dinverse, UPCAST, PRECISION)
    da = as_operand(da, inverse.dtype, UPCAST)
    da = product(da, tl.trans(inverse), UPCAST, PRECISION)
    da = tl.where(row[:, None] > row[None, :], -da * decay_between(decay), 0.0)
    through_memory(scratch_ptr, beta[:, None] * da, unit, UPCAST)
    kk = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        kk = product_onto(kk, k, tl.trans(k), UPCAST, PRECISION)
    kk *= da
    dbeta += tl.sum(kk, 1)
    dgate = sum_between_tokens(beta[:, None] * kk)

    for tile in tl.static_range(KEY_TILES):
        dgate += tl.load(partial_dgates_ptr + (unit * KEY_TILES + tile) * C + row)
    w_products = tl.zeros([C], tl.float32)
    for start in range(0, K, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        k = token_tile(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head // GROUP, first, count, key, K,
        )  # fmt: skip
        dw = unit_tile(dw_ptr, unit, row, key, C, K)
        # Loaded again: kept, they would hold registers throughout the kernel.
        inverse = unit_tile(inverses_ptr, unit, row, row, C, C)
        weighted = unit_tile(scratch_ptr, unit, row, row, C, C)
        dw_k = exp_decay[:, None] * product(tl.trans(inverse), dw, UPCAST, PRECISION)
        w_products += tl.sum(dw_k * k.to(tl.float32), 1)
        dk = unit_tile(partial_dk_ptr, unit, row, key, C, K) + beta[:, None] * dw_k
        dk = product_onto(dk, weighted, k, UPCAST, PRECISION)
        dk = product_onto(dk, tl.trans(weighted), k, UPCAST, PRECISION)
        store_token_tile(dk_ptr, dk, batch, head, first, count, tokens, heads, key, K, UPCAST)
    dbeta += w_products
    dgate += sum_from_token_on(beta * w_products)
    g = token_scalars(g_ptr, batch, head, first, count, tokens, heads)
    dgate = tl.where(g < LEAST_DECAY, 0.0, dgate)
    store_token_scalars(dg_ptr, dgate, batch, head, first, count, tokens, heads)
    store_token_scalars(dbeta_ptr, dbeta, batch, head, first, count, tokens, heads)
