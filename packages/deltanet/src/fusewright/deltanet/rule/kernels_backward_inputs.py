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
    decay_from_start,
    decay_to_end,
    last_decays,
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
    unit_decays,
    unit_tile,
    zeros,
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
    CONFIG: tl.constexpr,
):
    """One program computes, for one unit, BLOCK_K columns of dq, of dW and of the part of dk that
    does not go through T, and its partial sum of dg.
    """
    TILES: tl.constexpr = (CONFIG.K + CONFIG.BLOCK_K - 1) // CONFIG.BLOCK_K
    unit = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) // TILES % heads
    place = locate_chunk(table_ptr, tl.program_id(0) // TILES // heads, tokens, chunks)
    do_rows = (do_ptr, do_batch_stride, do_token_stride, do_head_stride)
    q_rows = (q_ptr, q_batch_stride, q_token_stride, q_head_stride)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    PARTS: tl.constexpr = CONFIG.PARTS
    row = tl.arange(0, C)
    key = tl.program_id(0) % TILES * CONFIG.BLOCK_K + tl.arange(0, CONFIG.BLOCK_K)
    decays = unit_decays(decays_ptr, unit, CONFIG)
    last = last_decays(decays_ptr, unit, CONFIG)
    q = token_tile(q_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
    k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)

    # Two loops over the values: all five sums at once do not fit into registers.
    dq = zeros(C, CONFIG.BLOCK_K)
    dw = zeros(C, CONFIG.BLOCK_K)
    weights = zeros(C, C)
    for start in range(0, CONFIG.V, CONFIG.BLOCK_V):
        col = start + tl.arange(0, CONFIG.BLOCK_V)
        do = token_tile(do_rows, head, place, col, CONFIG.V)
        values = unit_tile(values_ptr, unit, row, col, C, CONFIG.V)
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, CONFIG.V)
        state = tl.trans(unit_tile(states_ptr, unit, key, col, CONFIG.K, CONFIG.V))
        dq = product_onto(dq, do, state, CONFIG)
        dw = product_onto(dw, dvalues, state, CONFIG)
        weights = product_onto(weights, do, tl.trans(values), CONFIG)
    store_unit_tile(dw_ptr, -dw, unit, row, key, C, CONFIG.K, CONFIG.UPCAST)
    weights = scale * weights * decay_between(decays, CONFIG)
    qk = product(q, tl.trans(k), CONFIG)
    pairs = tl.where(row[:, None] > row[None, :], weights * qk, 0.0)
    dgate = sum_between_tokens(pairs)
    dq *= scale * decay_from_start(decays, CONFIG)[:, None]
    dgate += sum_from_token_on(tl.sum(dq * q.to(tl.float32), 1))
    weights = as_operand(weights, q.dtype, CONFIG.UPCAST)
    dq = product_onto(dq, weights, k, CONFIG)
    store_token_tile(dq_ptr, dq, place, head, tokens, heads, key, CONFIG.K, CONFIG.UPCAST)

    dk = zeros(C, CONFIG.BLOCK_K)
    weights = zeros(C, C)
    for start in range(0, CONFIG.V, CONFIG.BLOCK_V):
        col = start + tl.arange(0, CONFIG.BLOCK_V)
        do = token_tile(do_rows, head, place, col, CONFIG.V)
        values = unit_tile(values_ptr, unit, row, col, C, CONFIG.V)
        dstate = unit_tile(dstates_ptr, unit, key, col, CONFIG.K, CONFIG.V)
        dk = product_onto(dk, values, tl.trans(dstate), CONFIG)
        # Recomputed and not the transpose of the one above: no product is transposed.
        weights = product_onto(weights, values, tl.trans(do), CONFIG)
    dk *= decay_to_end(decays, last, CONFIG)[:, None]
    key_products = tl.sum(dk * k.to(tl.float32), 1)
    products = zeros(CONFIG.BLOCK_K)
    for tile in tl.static_range(PARTS):
        at = (unit * PARTS + tile) * CONFIG.K + key
        products += tl.load(state_products_ptr + at, mask=key < CONFIG.K, other=0.0)
    # A token's own part, and the state, decay with each g that follows.
    earlier = tl.cumsum(key_products, 0) - key_products
    dgate += earlier + decay_from_start(last, CONFIG) * tl.sum(products, 0)
    weights = as_operand(
        scale * weights * decay_between_transposed(decays, CONFIG), q.dtype, CONFIG.UPCAST
    )
    dk = product_onto(dk, weights, q, CONFIG)
    store_unit_tile(partial_dk_ptr, dk, unit, row, key, C, CONFIG.K, CONFIG.UPCAST)
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
    CONFIG: tl.constexpr,
):
    """One program computes, for one unit, the gradients that go through T: dv, dbeta, the
    remaining parts of dk and dg.
    """
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    place = locate_chunk(table_ptr, tl.program_id(0) // heads, tokens, chunks)
    k_rows = (k_ptr, k_batch_stride, k_token_stride, k_head_stride)
    v_rows = (v_ptr, v_batch_stride, v_token_stride, v_head_stride)
    PARTS: tl.constexpr = CONFIG.PARTS
    row = tl.arange(0, C)
    decays = unit_decays(decays_ptr, unit, CONFIG)
    beta = token_scalars(beta_ptr, place, head, tokens, heads)
    exp_decay = decay_from_start(decays, CONFIG)
    inverse = unit_tile(inverses_ptr, unit, row, row, C, C)
    dbeta = zeros(C)
    dinverse = zeros(C, C)
    for start in range(0, CONFIG.V, CONFIG.BLOCK_V):
        col = start + tl.arange(0, CONFIG.BLOCK_V)
        v = token_tile(v_rows, head, place, col, CONFIG.V).to(tl.float32)
        dvalues = unit_tile(dvalues_ptr, unit, row, col, C, CONFIG.V)
        weighted = as_operand(beta[:, None] * v, inverse.dtype, CONFIG.UPCAST)
        dinverse = product_onto(dinverse, dvalues, tl.trans(weighted), CONFIG)
        dv = product(tl.trans(inverse), dvalues, CONFIG)
        dbeta += tl.sum(dv * v, 1)
        dv *= beta[:, None]
        store_token_tile(dv_ptr, dv, place, head, tokens, heads, col, CONFIG.V, CONFIG.UPCAST)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        dw = unit_tile(dw_ptr, unit, row, key, C, CONFIG.K)
        weighted = (beta * exp_decay)[:, None] * k.to(tl.float32)
        weighted = as_operand(weighted, inverse.dtype, CONFIG.UPCAST)
        dinverse = product_onto(dinverse, dw, tl.trans(weighted), CONFIG)

    # dA = -T^T dT T^T, as a gradient of k k^T, still without beta of the later token.
    dinverse = as_operand(dinverse, inverse.dtype, CONFIG.UPCAST)
    da = product(tl.trans(inverse), dinverse, CONFIG)
    da = as_operand(da, inverse.dtype, CONFIG.UPCAST)
    da = product(da, tl.trans(inverse), CONFIG)
    da = tl.where(row[:, None] > row[None, :], -da * decay_between(decays, CONFIG), 0.0)
    through_memory(scratch_ptr, beta[:, None] * da, unit, CONFIG.UPCAST)
    kk = zeros(C, C)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        kk = product_onto(kk, k, tl.trans(k), CONFIG)
    kk *= da
    dbeta += tl.sum(kk, 1)
    dgate = sum_between_tokens(beta[:, None] * kk)

    for tile in tl.static_range(PARTS):
        dgate += tl.load(partial_dgates_ptr + (unit * PARTS + tile) * C + row)
    w_products = zeros(C)
    for start in range(0, CONFIG.K, CONFIG.BLOCK_K):
        key = start + tl.arange(0, CONFIG.BLOCK_K)
        k = token_tile(k_rows, head // CONFIG.GROUP, place, key, CONFIG.K)
        dw = unit_tile(dw_ptr, unit, row, key, C, CONFIG.K)
        # Loaded again: kept, they would hold registers throughout the kernel.
        inverse = unit_tile(inverses_ptr, unit, row, row, C, C)
        weighted = unit_tile(scratch_ptr, unit, row, row, C, C)
        dw_k = exp_decay[:, None] * product(tl.trans(inverse), dw, CONFIG)
        w_products += tl.sum(dw_k * k.to(tl.float32), 1)
        dk = unit_tile(partial_dk_ptr, unit, row, key, C, CONFIG.K) + beta[:, None] * dw_k
        dk = product_onto(dk, weighted, k, CONFIG)
        dk = product_onto(dk, tl.trans(weighted), k, CONFIG)
        store_token_tile(dk_ptr, dk, place, head, tokens, heads, key, CONFIG.K, CONFIG.UPCAST)
    dbeta += w_products
    dgate += sum_from_token_on(beta * w_products)
    g = token_scalars(g_ptr, place, head, tokens, heads)
    dgate = tl.where(g < LEAST_DECAY, 0.0, dgate)
    store_token_scalars(dg_ptr, dgate, place, head, tokens, heads)
    store_token_scalars(dbeta_ptr, dbeta, place, head, tokens, heads)
