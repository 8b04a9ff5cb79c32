"""Triton kernel of the scan's backward pass after the reads: weights and momentum, from the last
chunk to the first, which alone has to go from chunk to chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    load_b2,
    load_matrix,
    load_weights,
    product,
    product_onto,
    store_matrix,
    store_memory,
    store_token_rows,
    token_rows,
)
from .tiles import (
    COUNTS,
    FACTOR,
    hypotenuse,
    is_reset,
    load_last,
    load_memory,
    load_written,
    norms_of_rows,
    store_part,
    sum_of_programs,
    through_inner_gradient,
    token_numbers,
)


@triton.jit
def add_to_memory(memory, weights, block, CONFIG: tl.constexpr):
    """One block of a memory, added to what is stored."""
    w1, b1, w2, b2 = load_memory(memory, block, CONFIG)
    dw1, db1, dw2, db2 = weights
    # All threads have loaded the last biases before the head's first program overwrites its own.
    tl.debug_barrier()
    store_memory(memory, (w1 + dw1, b1 + db1, w2 + dw2, b2 + db2), block, CONFIG)


@triton.jit(do_not_specialize=COUNTS)
def scan_states_backward_kernel(
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
    dbegin_ptr,
    resets_ptr,
    dfirst_ptr,
    dv_ptr,
    written_ptr,
    parts_ptr,
    arrived_ptr,
    factors_ptr,
    e_wide_ptr,
    p_ptr,
    pull_ptr,
    tau_ptr,
    v_ptr,
    output_ptr,
    dk_norm_ptr,
    limit,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program carries the gradient of BLOCK_H hidden units of the memory and the momentum of
    one head back over ``chunks`` chunks from ``first_chunk`` on: it starts from ``dstate``, adds to
    the reads' gradients in ``dstates`` and ends with ``dbegin``, that of the memory with which the
    first chunk began; with the other BLOCKS - 1 programs of its head it adds up de. It computes dv,
    and writes the gradient of z over that of h. Weights' gradients are held as [BLOCK_D, BLOCK_H],
    as in the forward pass. That of the memory with which a chunk that ``resets`` names began is
    added to ``dfirst``, and none passes to the chunk before.

    With RESIDUAL_NORM e is a function of ``output``, v and k, and ``dk_norm`` [C, D] is the
    gradient of k through it alone.

    With a ``limit`` e and p are those that the clip has left, and rho e_0 = e, rho depending on the
    square n of the norm of the gradient: for a token that is clipped, d rho / d n = -rho / (2 n).
    Its gradient by n is tau / 2 times the squares of rho, with ``tau`` [C] = -<de, e> / limit^2, so
    that n's gradients add tau times (|h|^2 + 1) e, (|k|^2 + 1) p, |e|^2 h and |p|^2 k to those of
    e, p, h and k; ``pull`` has the first of these, and through p the second, for all hidden units.
    """
    C: tl.constexpr = CONFIG.C
    D: tl.constexpr = CONFIG.D
    HIDDEN: tl.constexpr = CONFIG.HIDDEN
    SIZE: tl.constexpr = CONFIG.SIZE
    own = (tl.program_id(0) // CONFIG.BLOCKS).to(tl.int64)
    block = tl.program_id(0) % CONFIG.BLOCKS
    batch = own // heads
    head = own % heads
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    v_at = v_ptr, v_batch_stride, v_token_stride, v_head_stride
    token = tl.arange(0, CONFIG.BLOCK_C)
    col = tl.arange(0, CONFIG.BLOCK_D)
    row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    dmemory = dstate_ptr + own * (2 * SIZE)
    dw1, db1, dw2, db2 = load_memory(dmemory, block, CONFIG)
    ds1, dsb1, ds2, dsb2 = load_memory(dmemory + SIZE, block, CONFIG)
    for back in tl.range(0, chunks, num_stages=1):
        local = own * chunks + (chunks - 1 - back)
        chunk = first_chunk + (chunks - 1 - back)
        first = chunk * C
        place = batch, head, first
        count = tl.minimum(tokens - first, C)
        there = token < count
        corner = local * (C * HIDDEN)
        written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
        k = token_rows(k_at, place, written, CONFIG)
        gamma, nu, keep, carry, decay = load_last(
            (gamma_ptr, nu_ptr, reach_ptr), local, count, CONFIG
        )
        to_memory = -gamma[:, None]
        to_momentum = -nu[:, None]
        dp = load_matrix(dp_ptr + corner, token, row, C, HIDDEN).to(tl.float32)
        # The gradient of p, through the chunk's end too; then of dh.
        k_wide = k.to(tl.float32)
        k_end = (to_memory * k_wide).to(k.dtype)
        dp = product_onto(dp, k_end, dw1.to(k.dtype), CONFIG)
        k_end = (to_momentum * k_wide).to(k.dtype)
        dp = product_onto(dp, k_end, ds1.to(k.dtype), CONFIG)
        dp += to_memory * db1[None, :] + to_momentum * dsb1[None, :]
        slope = load_matrix(slope_ptr + corner, token, row, C, HIDDEN)
        ddh = (dp * slope.to(tl.float32)).to(k.dtype)

        # The gradient of e, from all of these.
        memory = states_ptr + (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
        w2 = tl.trans(load_weights(memory, block, 2, CONFIG).to(k.dtype))
        dw2_rounded = dw2.to(k.dtype)
        ds2_rounded = ds2.to(k.dtype)
        h = load_matrix(h_ptr + corner, token, row, C, HIDDEN)
        h_wide = h.to(tl.float32)
        de = product(ddh, tl.trans(w2), CONFIG)
        h_end = (to_memory * h_wide).to(k.dtype)
        de = product_onto(de, h_end, tl.trans(dw2_rounded), CONFIG)
        h_end = (to_momentum * h_wide).to(k.dtype)
        de = product_onto(de, h_end, tl.trans(ds2_rounded), CONFIG)
        # The reads' gradients. Of the last biases, before the head's first program may overwrite
        # them.
        target = dstates_ptr + local * (2 * SIZE)
        b2_read = load_b2(target, CONFIG)
        sb2_read = load_b2(target + SIZE, CONFIG)
        # Work that needs no other program stands between storing the part and loading the sum.
        if CONFIG.BLOCKS > 1:
            store_part(de, parts_ptr, arrived_ptr, own, block, back, CONFIG)
        e = load_matrix(e_ptr + local * (C * D), token, col, C, D)
        dh = load_matrix(dh_ptr + corner, token, row, C, HIDDEN).to(tl.float32)
        de_read = load_matrix(de_ptr + local * (C * D), token, col, C, D)
        curve = load_matrix(curve_ptr + corner, token, row, C, HIDDEN)
        slope = load_matrix(slope_ptr + corner, token, row, C, HIDDEN)
        e_wide = e.to(tl.float32)
        e_end = (to_memory * e_wide).to(k.dtype)
        dh = product_onto(dh, e_end, dw2_rounded, CONFIG)
        e_end = (to_momentum * e_wide).to(k.dtype)
        dh = product_onto(dh, e_end, ds2_rounded, CONFIG)
        de_read += to_memory * db2[None, :] + to_momentum * dsb2[None, :]
        # Gradients of the memory and the momentum with which the chunk began.
        w1_read, b1_read, w2_read, _ = load_memory(target, block, CONFIG)
        s1_read, sb1_read, s2_read, _ = load_memory(target + SIZE, block, CONFIG)
        ds1 = carry * dw1 + decay * ds1 + s1_read
        dw1 = keep * dw1 + w1_read
        dsb1 = carry * db1 + decay * dsb1 + sb1_read
        db1 = keep * db1 + b1_read
        ds2 = carry * dw2 + decay * ds2 + s2_read
        dw2 = keep * dw2 + w2_read
        dsb2 = carry * db2 + decay * dsb2 + sb2_read
        db2 = keep * db2 + b2_read
        dw2 = product_onto(dw2, tl.trans(e), ddh, CONFIG)
        # All threads have loaded the reads' gradients and that of h before they are overwritten.
        tl.debug_barrier()
        if CONFIG.BLOCKS > 1:
            de = sum_of_programs(parts_ptr, arrived_ptr, own, back, CONFIG)

        # Gradients of v, h and z.
        de += de_read
        if limit is not None:
            at = token_numbers(factors_ptr, place, there, tokens, heads, CONFIG)
            factor = tl.load(at, mask=written, other=1.0)
            e_wide = load_matrix(e_wide_ptr + local * (C * D), token, col, C, D)
            tau = -tl.sum(de * e_wide, 1) / limit / limit
            tau = tl.where(factor < 1.0, tau, 0.0)
            tl.store(tau_ptr + local * C + token, tau, mask=(token < C) & (block == 0))
            de += tau[:, None] * load_matrix(pull_ptr + local * (C * D), token, col, C, D)
            de *= factor[:, None]
            p = load_matrix(p_ptr + corner, token, row, C, HIDDEN).to(tl.float32)
            # Squares of the norms of an outlier would overflow.
            k_norm = norms_of_rows(k.to(tl.float32))
            k_norm = hypotenuse(k_norm, tl.full([CONFIG.BLOCK_C], 1.0, tl.float32))
            more = (tau * k_norm)[:, None] * (k_norm[:, None] * p)
            dp += more
            more = (more * slope.to(tl.float32)).to(k.dtype)
            dw2 = product_onto(dw2, tl.trans(e), more, CONFIG)
            e_norm = norms_of_rows(e_wide)
            dh += (tau * e_norm)[:, None] * (e_norm[:, None] * h_wide)
        if CONFIG.RESIDUAL_NORM:
            v = token_rows(v_at, place, written, CONFIG)
            output = load_matrix(output_ptr + local * (C * D), token, col, C, D)
            dr, dk = through_inner_gradient(de, output, k, v, CONFIG)
            dr = tl.where(written[:, None], dr, 0.0)
            dk = tl.where(written[:, None], dk, 0.0)
            own_row = tl.where(block == 0, token, C)
            store_matrix(dk_norm_ptr + local * (C * D), dk, own_row, col, C, D)
        else:
            dr = tl.where(written[:, None], FACTOR * de, 0.0)
            dk = dr
        store_token_rows(dv_ptr, -dk, place, there & (block == 0), tokens, heads, CONFIG)
        db2 += tl.sum(dr, 0)
        dr = dr.to(k.dtype)
        dh = product_onto(dh, dr, w2, CONFIG)
        dz = dp * curve.to(tl.float32) + dh * slope.to(tl.float32)
        db1 += tl.sum(dz, 0)
        dz = dz.to(k.dtype)
        store_matrix(dh_ptr + corner, dz, token, row, C, HIDDEN)
        dw2 = product_onto(dw2, tl.trans(dr), h, CONFIG)
        dw1 = product_onto(dw1, tl.trans(k), dz, CONFIG)
        if resets_ptr is not None:
            reset = is_reset(resets_ptr, batch, chunk, tokens, CONFIG)
            if reset:
                first_memory = dfirst_ptr + own * (2 * SIZE)
                add_to_memory(first_memory, (dw1, db1, dw2, db2), block, CONFIG)
                add_to_memory(first_memory + SIZE, (ds1, dsb1, ds2, dsb2), block, CONFIG)
            dw1, ds1 = tl.where(reset, 0.0, dw1), tl.where(reset, 0.0, ds1)
            dw2, ds2 = tl.where(reset, 0.0, dw2), tl.where(reset, 0.0, ds2)
            db1, dsb1 = tl.where(reset, 0.0, db1), tl.where(reset, 0.0, dsb1)
            db2, dsb2 = tl.where(reset, 0.0, db2), tl.where(reset, 0.0, dsb2)
        if back == chunks - 1:
            target = dbegin_ptr + own * (2 * SIZE)
        store_memory(target, (dw1, db1, dw2, db2), block, CONFIG)
        store_memory(target + SIZE, (ds1, dsb1, ds2, dsb2), block, CONFIG)
