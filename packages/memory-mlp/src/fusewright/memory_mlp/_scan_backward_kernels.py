"""The other parts of the scan's backward pass: of weights and momentum, from the last chunk to the
first, which is all that must go from chunk to chunk; then of all keys and ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._scan_decays_kernels import COUNTS
from ._scan_forward_kernels import load_last
from ._scan_tiles import (
    FACTOR,
    load_b1,
    load_b2,
    load_matrix,
    load_weights,
    load_written,
    product,
    product_onto,
    store_matrix,
    store_token_rows,
    store_weights,
    summed_over_blocks,
    token_rows,
)


@triton.jit
def gradient_after(dstate_ptr, dstates_ptr, own, local, is_last, SIZE: tl.constexpr):
    """Where the gradient of the memory lies with which a chunk ends: where that of the next chunk's
    beginning was put, or before the first of all steps where it was given.
    """
    after = dstates_ptr + (local + 1) * (2 * SIZE)
    if is_last:
        after = dstate_ptr + own * (2 * SIZE)
    return after


@triton.jit
def turned_rows(
    x_ptr,
    local,
    block,
    C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A block of [C, HIDDEN] of a chunk, transposed."""
    row = block * BLOCK_H + tl.arange(0, BLOCK_H)
    return tl.trans(
        load_matrix(x_ptr + local * (C * HIDDEN), tl.arange(0, BLOCK_C), row, C, HIDDEN)
    )


@triton.jit(do_not_specialize=COUNTS)
def _scan_states_backward_kernel(
    k_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    states_ptr,
    h_ptr,
    slope_ptr,
    curve_ptr,
    e_ptr,
    de_ptr,
    dh_ptr,
    dp_ptr,
    dstates_ptr,
    dstate_ptr,
    dv_ptr,
    written_ptr,
    parts_ptr,
    arrived_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program carries the gradient of BLOCK_H hidden units of the memory and the momentum of
    one head back over ``chunks`` chunks from ``first_chunk`` on: it starts from ``dstate`` and adds
    to the reads' shares in ``dstates``; with the BLOCKS programs of its head it shares de. It
    computes dv, and writes the gradient of z over that of h. Tiles of the hidden layer are
    [BLOCK_H, BLOCK_C].
    """
    SIZE: tl.constexpr = 2 * HIDDEN * D + HIDDEN + D
    own = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    batch = own // heads
    head = own % heads
    token = tl.arange(0, BLOCK_C)
    col = tl.arange(0, BLOCK_D)
    row = block * BLOCK_H + tl.arange(0, BLOCK_H)
    dmemory = dstate_ptr + own * (2 * SIZE)
    dmomentum = dmemory + SIZE
    dw1 = load_weights(dmemory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
    ds1 = load_weights(dmomentum, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
    dw2 = load_weights(dmemory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
    ds2 = load_weights(dmomentum, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
    db1 = load_b1(dmemory, block, D, HIDDEN, BLOCK_H)
    dsb1 = load_b1(dmomentum, block, D, HIDDEN, BLOCK_H)
    db2 = load_b2(dmemory, D, HIDDEN, BLOCK_D)
    dsb2 = load_b2(dmomentum, D, HIDDEN, BLOCK_D)
    for back in tl.range(0, chunks, num_stages=1):
        local = own * chunks + (chunks - 1 - back)
        chunk = first_chunk + (chunks - 1 - back)
        first = chunk * C
        count = tl.minimum(tokens - first, C)
        there = token < count
        written = load_written(
            written_ptr, batch, head, first, there, tokens, heads, HAS_MASK, BLOCK_C
        )
        k = token_rows(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head, first, written, D, BLOCK_C, BLOCK_D,
        )  # fmt: skip
        gamma, nu, keep, carry, decay = load_last(
            gamma_ptr, nu_ptr, reach_ptr, local, count, C, BLOCK_C
        )
        # The gradients of the rows p, through the chunk's end and the reads; then of dh.
        dp = turned_rows(dp_ptr, local, block, C, HIDDEN, BLOCK_C, BLOCK_H).to(tl.float32)
        k_wide = tl.trans(k).to(tl.float32)
        k_end = (-gamma[None, :] * k_wide).to(k.dtype)
        dp = product_onto(dp, dw1.to(k.dtype), k_end, UPCAST, PRECISION)
        k_end = (-nu[None, :] * k_wide).to(k.dtype)
        dp = product_onto(dp, ds1.to(k.dtype), k_end, UPCAST, PRECISION)
        dp -= gamma[None, :] * db1[:, None] + nu[None, :] * dsb1[:, None]
        slope = turned_rows(slope_ptr, local, block, C, HIDDEN, BLOCK_C, BLOCK_H)
        ddh = (dp * slope.to(tl.float32)).to(k.dtype)

        # Of e, from all of these.
        memory = states_ptr + (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
        w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H).to(k.dtype)
        dw2_rounded = dw2.to(k.dtype)
        ds2_rounded = ds2.to(k.dtype)
        h = turned_rows(h_ptr, local, block, C, HIDDEN, BLOCK_C, BLOCK_H)
        h_wide = h.to(tl.float32)
        de = product(tl.trans(ddh), w2, UPCAST, PRECISION)
        h_end = tl.trans((-gamma[None, :] * h_wide).to(k.dtype))
        de = product_onto(de, h_end, dw2_rounded, UPCAST, PRECISION)
        h_end = tl.trans((-nu[None, :] * h_wide).to(k.dtype))
        de = product_onto(de, h_end, ds2_rounded, UPCAST, PRECISION)
        # Read before the programs of the head meet, as one of them overwrites it after.
        target = dstates_ptr + local * (2 * SIZE)
        b2_read = load_b2(target, D, HIDDEN, BLOCK_D)
        sb2_read = load_b2(target + SIZE, D, HIDDEN, BLOCK_D)
        if BLOCKS > 1:
            de = summed_over_blocks(
                de, parts_ptr, arrived_ptr, own, block, back, BLOCKS, BLOCK_C, BLOCK_D
            )
        de += load_matrix(de_ptr + local * (C * D), token, col, C, D)
        de -= gamma[:, None] * db2[None, :] + nu[:, None] * dsb2[None, :]
        dr = tl.where(written[:, None], FACTOR * de, 0.0)
        store_token_rows(
            dv_ptr, -dr, batch, head, first, there & (block == 0),
            tokens, heads, D, BLOCK_C, BLOCK_D,
        )  # fmt: skip

        # Of h and z.
        e = load_matrix(e_ptr + local * (C * D), token, col, C, D)
        e_wide = tl.trans(e).to(tl.float32)
        dh = turned_rows(dh_ptr, local, block, C, HIDDEN, BLOCK_C, BLOCK_H).to(tl.float32)
        e_end = (-gamma[None, :] * e_wide).to(k.dtype)
        dh = product_onto(dh, dw2_rounded, e_end, UPCAST, PRECISION)
        e_end = (-nu[None, :] * e_wide).to(k.dtype)
        dh = product_onto(dh, ds2_rounded, e_end, UPCAST, PRECISION)
        dr_sum = tl.sum(dr, 0)
        dr = dr.to(k.dtype)
        dh = product_onto(dh, w2, tl.trans(dr), UPCAST, PRECISION)
        curve = turned_rows(curve_ptr, local, block, C, HIDDEN, BLOCK_C, BLOCK_H)
        slope = turned_rows(slope_ptr, local, block, C, HIDDEN, BLOCK_C, BLOCK_H)
        dz = dp * curve.to(tl.float32) + dh * slope.to(tl.float32)
        dz_sum = tl.sum(dz, 1)
        dz = dz.to(k.dtype)
        # Everybody has read the gradient of h before that of z takes its place.
        tl.debug_barrier()
        store_matrix(dh_ptr + local * (C * HIDDEN), tl.trans(dz), token, row, C, HIDDEN)

        # Of the memory and the momentum with which the chunk began.
        ds2 = carry * dw2 + decay * ds2
        ds2 += load_weights(target + SIZE, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        dw2 = keep * dw2 + load_weights(target, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        dw2 = product_onto(dw2, ddh, e, UPCAST, PRECISION)
        dw2 = product_onto(dw2, h, dr, UPCAST, PRECISION)
        ds1 = carry * dw1 + decay * ds1
        ds1 += load_weights(target + SIZE, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        dw1 = keep * dw1 + load_weights(target, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        dw1 = product_onto(dw1, dz, k, UPCAST, PRECISION)
        dsb1 = carry * db1 + decay * dsb1
        dsb1 += load_b1(target + SIZE, block, D, HIDDEN, BLOCK_H)
        db1 = keep * db1 + load_b1(target, block, D, HIDDEN, BLOCK_H) + dz_sum
        dsb2 = carry * db2 + decay * dsb2 + sb2_read
        db2 = keep * db2 + b2_read + dr_sum
        # As above, of the reads' shares.
        tl.debug_barrier()
        store_weights(target, dw1, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        store_weights(target + SIZE, ds1, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        store_weights(target, dw2, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        store_weights(target + SIZE, ds2, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        b1_at = target + 2 * HIDDEN * D + row
        tl.store(b1_at, db1, mask=row < HIDDEN)
        tl.store(b1_at + SIZE, dsb1, mask=row < HIDDEN)
        b2_at = target + (2 * HIDDEN * D + HIDDEN) + col
        tl.store(b2_at, db2, mask=(col < D) & (block == 0))
        tl.store(b2_at + SIZE, dsb2, mask=(col < D) & (block == 0))


@triton.jit(do_not_specialize=COUNTS)
def _scan_keys_backward_kernel(
    k_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    states_ptr,
    e_ptr,
    h_ptr,
    p_ptr,
    dk_read_ptr,
    dz_ptr,
    dstates_ptr,
    dstate_ptr,
    written_ptr,
    dk_ptr,
    dlast_ptr,
    dend_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program computes dk of one chunk of one head, and the gradients of the last rows of gamma
    and nu and of the last keep, carry and decay, from the gradient of the memory with which the
    chunk ends.
    """
    SIZE: tl.constexpr = 2 * HIDDEN * D + HIDDEN + D
    local = tl.program_id(0).to(tl.int64)
    own = local // chunks
    chunk = first_chunk + local % chunks
    batch = own // heads
    head = own % heads
    first = chunk * C
    count = tl.minimum(tokens - first, C)
    token = tl.arange(0, BLOCK_C)
    col = tl.arange(0, BLOCK_D)
    there = token < count
    written = load_written(written_ptr, batch, head, first, there, tokens, heads, HAS_MASK, BLOCK_C)
    k = token_rows(
        k_ptr, k_batch_stride, k_token_stride, k_head_stride,
        batch, head, first, written, D, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    gamma, nu, _, _, _ = load_last(gamma_ptr, nu_ptr, reach_ptr, local, count, C, BLOCK_C)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    momentum = memory + SIZE
    is_last = local % chunks == chunks - 1
    dmemory = gradient_after(dstate_ptr, dstates_ptr, own, local, is_last, SIZE)
    dmomentum = dmemory + SIZE
    e = load_matrix(e_ptr + local * (C * D), token, col, C, D)
    b2 = load_b2(memory, D, HIDDEN, BLOCK_D)
    sb2 = load_b2(momentum, D, HIDDEN, BLOCK_D)
    db2 = load_b2(dmemory, D, HIDDEN, BLOCK_D)
    dsb2 = load_b2(dmomentum, D, HIDDEN, BLOCK_D)
    dgamma = -tl.sum(e.to(tl.float32) * db2[None, :], 1)
    dnu = -tl.sum(e.to(tl.float32) * dsb2[None, :], 1)
    dkeep = tl.sum(db2 * b2)
    dcarry = tl.sum(db2 * sb2)
    ddecay = tl.sum(dsb2 * sb2)
    corner = local * (C * HIDDEN)
    dk = load_matrix(dk_read_ptr + local * (C * D), token, col, C, D)
    for block in tl.range(0, BLOCKS, num_stages=1):
        row = block * BLOCK_H + tl.arange(0, BLOCK_H)
        h = load_matrix(h_ptr + corner, token, row, C, HIDDEN).to(tl.float32)
        w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        s2 = load_weights(momentum, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        dw2 = load_weights(dmemory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        ds2 = load_weights(dmomentum, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
        dkeep += tl.sum(dw2 * w2)
        dcarry += tl.sum(dw2 * s2)
        ddecay += tl.sum(ds2 * s2)
        dgamma -= tl.sum(h * product(e, tl.trans(dw2.to(k.dtype)), UPCAST, PRECISION), 1)
        dnu -= tl.sum(h * product(e, tl.trans(ds2.to(k.dtype)), UPCAST, PRECISION), 1)

        dw1 = load_weights(dmemory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        ds1 = load_weights(dmomentum, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        w1 = load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        s1 = load_weights(momentum, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
        dkeep += tl.sum(dw1 * w1)
        dcarry += tl.sum(dw1 * s1)
        ddecay += tl.sum(ds1 * s1)
        b1 = load_b1(memory, block, D, HIDDEN, BLOCK_H)
        sb1 = load_b1(momentum, block, D, HIDDEN, BLOCK_H)
        db1 = load_b1(dmemory, block, D, HIDDEN, BLOCK_H)
        dsb1 = load_b1(dmomentum, block, D, HIDDEN, BLOCK_H)
        dkeep += tl.sum(db1 * b1)
        dcarry += tl.sum(db1 * sb1)
        ddecay += tl.sum(dsb1 * sb1)
        # p against k dw1^T + db1 is k against p dw1, and p against the biases.
        p = load_matrix(p_ptr + corner, token, row, C, HIDDEN)
        p_wide = p.to(tl.float32)
        by_p = product(p, dw1.to(k.dtype), UPCAST, PRECISION)
        dgamma -= tl.sum(by_p * k.to(tl.float32), 1) + tl.sum(p_wide * db1[None, :], 1)
        dk -= gamma[:, None] * by_p
        by_p = product(p, ds1.to(k.dtype), UPCAST, PRECISION)
        dnu -= tl.sum(by_p * k.to(tl.float32), 1) + tl.sum(p_wide * dsb1[None, :], 1)
        dk -= nu[:, None] * by_p
        dz = load_matrix(dz_ptr + corner, token, row, C, HIDDEN)
        dk += product(dz, w1.to(k.dtype), UPCAST, PRECISION)
    store_token_rows(dk_ptr, dk, batch, head, first, there, tokens, heads, D, BLOCK_C, BLOCK_D)
    dlast = dlast_ptr + local * (2 * C) + token
    tl.store(dlast, dgamma, mask=there)
    tl.store(dlast + C, dnu, mask=there)
    tl.store(dend_ptr + local * 3, dkeep)
    tl.store(dend_ptr + local * 3 + 1, dcarry)
    tl.store(dend_ptr + local * 3 + 2, ddecay)
