"""Triton kernel of the first part of the scan's backward pass: the reads of all chunks at once,
which the forward kernel has recomputed from the weights with which each chunk began.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    load_b1,
    load_b2,
    load_matrix,
    load_weights,
    product,
    product_onto,
    store_matrix,
    store_token_rows,
    store_weights,
    token_rows,
    zeros,
)
from .tiles import (
    COUNTS,
    chunk_of_program,
    load_seen,
    load_written,
    normalised,
    through_norm,
)


@triton.jit(do_not_specialize=COUNTS)
def scan_read_backward_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    written_ptr,
    gamma_ptr,
    reach_ptr,
    states_ptr,
    rest_ptr,
    e_ptr,
    h_ptr,
    p_ptr,
    read_h_ptr,
    read_slope_ptr,
    matches_ptr,
    read_output_ptr,
    dq_ptr,
    dk_ptr,
    de_ptr,
    dh_ptr,
    dp_ptr,
    dgamma_ptr,
    dreach_ptr,
    dstates_ptr,
    drests_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    dy_batch_stride,
    dy_token_stride,
    dy_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes, for one chunk of one head, dq, and the gradients through the reads of
    k, e, h and p, of gamma, keep and carry, of the memory and momentum with which the chunk began,
    and of ``rest``, in ``drests`` [SIZE] of each chunk. The gradients of h and p may overwrite
    ``read_h`` and ``read_slope``.
    """
    C: tl.constexpr = CONFIG.C
    D: tl.constexpr = CONFIG.D
    HIDDEN: tl.constexpr = CONFIG.HIDDEN
    SIZE: tl.constexpr = CONFIG.SIZE
    BLOCK_C: tl.constexpr = CONFIG.BLOCK_C
    local, own, chunk, place, count, there = chunk_of_program(
        first_chunk, chunks, tokens, heads, CONFIG
    )
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    q_at = q_ptr, q_batch_stride, q_token_stride, q_head_stride
    dy_at = dy_ptr, dy_batch_stride, dy_token_stride, dy_head_stride
    token = tl.arange(0, BLOCK_C)
    col = tl.arange(0, CONFIG.BLOCK_D)
    corner = local * (C * HIDDEN)
    written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
    k = token_rows(k_at, place, written, CONFIG)
    q = token_rows(q_at, place, there, CONFIG)
    dy = token_rows(dy_at, place, there, CONFIG)
    dy_wide = dy.to(tl.float32)
    if CONFIG.RESIDUAL_NORM:
        read_output = load_matrix(read_output_ptr + local * (C * D), token, col, C, D)
        n, inverse = normalised(read_output, CONFIG)
        dy_wide = through_norm(dy_wide, n, inverse, CONFIG)
        dy = dy_wide.to(k.dtype)
    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, CONFIG)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    momentum = memory + SIZE
    dmemory = dstates_ptr + local * (2 * SIZE)
    dmomentum = dmemory + SIZE
    if rest_ptr is not None:
        rest = rest_ptr + place[1] * SIZE
        drest = drests_ptr + local * SIZE

    # The second layer's product with e, and its biases.
    e = load_matrix(e_ptr + local * (C * D), token, col, C, D)
    matches = load_matrix(matches_ptr + local * (C * C), token, token, C, C)
    dye = product(dy, tl.trans(e), CONFIG)
    de = product(tl.trans((-matches * gamma).to(k.dtype)), dy, CONFIG)
    store_matrix(de_ptr + local * (C * D), de, token, col, C, D)
    at = dgamma_ptr + local * (C * C)
    store_matrix(at, -matches * dye, token, token, C, C)
    dmatches = (-gamma * dye).to(k.dtype)
    dkeep = tl.sum(dy_wide * load_b2(memory, CONFIG)[None, :], 1)
    dcarry = tl.sum(dy_wide * load_b2(momentum, CONFIG)[None, :], 1)
    dy_kept = keep * dy_wide
    dy_carried = carry * dy_wide
    b2_at = dmemory + 2 * HIDDEN * D + HIDDEN + col
    tl.store(b2_at, tl.sum(dy_kept, 0), mask=col < D)
    tl.store(b2_at + SIZE, tl.sum(dy_carried, 0), mask=col < D)
    dy_kept = dy_kept.to(k.dtype)
    dy_carried = dy_carried.to(k.dtype)
    if rest_ptr is not None:
        dkeep -= tl.sum(dy_wide * load_b2(rest, CONFIG)[None, :], 1)
        dy_rested = (1.0 - keep) * dy_wide
        at_b2 = drest + 2 * HIDDEN * D + HIDDEN + col
        tl.store(at_b2, tl.sum(dy_rested, 0), mask=col < D)
        dy_rested = dy_rested.to(k.dtype)
    # One layer after the other, dz stored in between: both at once would fill the registers.
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        h_q = load_matrix(read_h_ptr + corner, token, row, C, HIDDEN)
        # Operands that are the same for all blocks stand on the right: a left one is held in
        # registers, and ptxas overwrites them although the next iteration needs them.
        dw2 = product(tl.trans(h_q), dy_kept, CONFIG)
        store_weights(dmemory, dw2, block, 2, CONFIG)
        ds2 = product(tl.trans(h_q), dy_carried, CONFIG)
        store_weights(dmomentum, ds2, block, 2, CONFIG)
        if rest_ptr is not None:
            store_weights(drest, product(tl.trans(h_q), dy_rested, CONFIG), block, 2, CONFIG)
        dh = product(tl.trans(dmatches), h_q, CONFIG).to(k.dtype)

        w2 = load_weights(memory, block, 2, CONFIG).to(k.dtype)
        dz = product(dy, tl.trans(w2), CONFIG)
        h_q = h_q.to(tl.float32)
        dkeep += tl.sum(h_q * dz, 1)
        s2 = load_weights(momentum, block, 2, CONFIG).to(k.dtype)
        dh_carried = product(dy, tl.trans(s2), CONFIG)
        dcarry += tl.sum(h_q * dh_carried, 1)
        dz = keep * dz + carry * dh_carried
        if rest_ptr is not None:
            r2 = load_weights(rest, block, 2, CONFIG).to(k.dtype)
            dh_rested = product(dy, tl.trans(r2), CONFIG)
            dkeep -= tl.sum(h_q * dh_rested, 1)
            dz += (1.0 - keep) * dh_rested
        h = load_matrix(h_ptr + corner, token, row, C, HIDDEN)
        dz = product_onto(dz, dmatches, h, CONFIG)
        slope = load_matrix(read_slope_ptr + corner, token, row, C, HIDDEN)
        dz *= slope.to(tl.float32)

        b1 = load_b1(memory, block, CONFIG)[None, :]
        dkeep += tl.sum(dz * b1, 1)
        sb1 = load_b1(momentum, block, CONFIG)[None, :]
        dcarry += tl.sum(dz * sb1, 1)
        b1_at = dmemory + 2 * HIDDEN * D + row
        tl.store(b1_at, tl.sum(keep * dz, 0), mask=row < HIDDEN)
        tl.store(b1_at + SIZE, tl.sum(carry * dz, 0), mask=row < HIDDEN)
        if rest_ptr is not None:
            dkeep -= tl.sum(dz * load_b1(rest, block, CONFIG)[None, :], 1)
            at_b1 = drest + 2 * HIDDEN * D + row
            tl.store(at_b1, tl.sum((1.0 - keep) * dz, 0), mask=row < HIDDEN)
        # All threads have loaded what these overwrite.
        tl.debug_barrier()
        store_matrix(dh_ptr + corner, dh, token, row, C, HIDDEN)
        store_matrix(dp_ptr + corner, dz.to(k.dtype), token, row, C, HIDDEN)
    tl.debug_barrier()

    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, CONFIG)
    by_p = product(q, tl.trans(k), CONFIG)
    by_p = tl.trans((-(by_p + 1.0) * gamma).to(k.dtype))
    q_kept = (keep * q.to(tl.float32)).to(k.dtype)
    q_carried = (carry * q.to(tl.float32)).to(k.dtype)
    dzp = zeros(BLOCK_C, BLOCK_C)
    dq_kept = zeros(BLOCK_C, CONFIG.BLOCK_D)
    dq_carried = zeros(BLOCK_C, CONFIG.BLOCK_D)
    if rest_ptr is not None:
        q_rested = ((1.0 - keep) * q.to(tl.float32)).to(k.dtype)
        dq_rested = zeros(BLOCK_C, CONFIG.BLOCK_D)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        dz = load_matrix(dp_ptr + corner, token, row, C, HIDDEN)
        p = load_matrix(p_ptr + corner, token, row, C, HIDDEN)
        dzp = product_onto(dzp, dz, tl.trans(p), CONFIG)
        dp = product(by_p, dz, CONFIG).to(k.dtype)
        w1 = load_weights(memory, block, 1, CONFIG).to(k.dtype)
        dq_kept = product_onto(dq_kept, dz, w1, CONFIG)
        s1 = load_weights(momentum, block, 1, CONFIG).to(k.dtype)
        dq_carried = product_onto(dq_carried, dz, s1, CONFIG)
        dw1 = product(tl.trans(dz), q_kept, CONFIG)
        store_weights(dmemory, dw1, block, 1, CONFIG)
        ds1 = product(tl.trans(dz), q_carried, CONFIG)
        store_weights(dmomentum, ds1, block, 1, CONFIG)
        if rest_ptr is not None:
            r1 = load_weights(rest, block, 1, CONFIG).to(k.dtype)
            dq_rested = product_onto(dq_rested, dz, r1, CONFIG)
            store_weights(drest, product(tl.trans(dz), q_rested, CONFIG), block, 1, CONFIG)
        tl.debug_barrier()
        store_matrix(dp_ptr + corner, dp, token, row, C, HIDDEN)
    # dz against q w1^T is dz w1 against q.
    q_wide = q.to(tl.float32)
    dkeep += tl.sum(q_wide * dq_kept, 1)
    dcarry += tl.sum(q_wide * dq_carried, 1)
    if rest_ptr is not None:
        dkeep -= tl.sum(q_wide * dq_rested, 1)
    dreach = dreach_ptr + local * (2 * C) + token
    tl.store(dreach, dkeep, mask=token < C)
    tl.store(dreach + C, dcarry, mask=token < C)
    # The first layer's product with p. Loaded and recomputed: held since the start, they would fill
    # the registers.
    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, CONFIG)
    dmatches = (-gamma * dzp).to(k.dtype)
    dq = keep * dq_kept + carry * dq_carried
    dq = product_onto(dq, dmatches, k, CONFIG)
    if rest_ptr is not None:
        dq += (1.0 - keep) * dq_rested
    if CONFIG.RESIDUAL_NORM:
        dq += token_rows(dy_at, place, there, CONFIG).to(tl.float32)
    store_token_rows(dq_ptr, dq, place, there, tokens, heads, CONFIG)
    dk = product(tl.trans(dmatches), q, CONFIG)
    store_matrix(dk_ptr + local * (C * D), dk, token, col, C, D)
    dzp *= product(q, tl.trans(k), CONFIG) + 1.0
    tl.debug_barrier()
    dgamma = load_matrix(at, token, token, C, C) - dzp
    tl.debug_barrier()
    store_matrix(at, dgamma, token, token, C, C)
