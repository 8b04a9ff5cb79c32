"""Triton kernels of the scan's backward pass after the reads: weights and momentum, from the last
chunk to the first, which alone has to go from chunk to chunk; then keys and ends of all chunks at
once, and the gates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    load_b1,
    load_b2,
    load_matrix,
    load_vector,
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
    TOKENS_AT_ONCE,
    chunk_of_program,
    hypotenuse,
    load_last,
    load_memory,
    load_written,
    norms_of_rows,
    store_part,
    sum_of_programs,
    through_inner_gradient,
    token_numbers,
)

# Of a rest, that one program adds up; unmeasured.
REST_NUMBERS = tl.constexpr(1024)


@triton.jit
def gradient_after(dstate_ptr, dstates_ptr, own, local, is_last, CONFIG: tl.constexpr):
    """The address of the gradient of the memory with which a chunk ends: that of the next chunk's
    start, or for the last chunk that of the end of these chunks.
    """
    after = dstates_ptr + (local + 1) * (2 * CONFIG.SIZE)
    if is_last:
        after = dstate_ptr + own * (2 * CONFIG.SIZE)
    return after


@triton.jit
def add_inner_products(totals, weights, momentum, dweights, dmomentum):
    """The gradients of the last keep, carry and decay through one tensor of a memory, added."""
    dkeep, dcarry, ddecay = totals
    dkeep += tl.sum(dweights * weights)
    dcarry += tl.sum(dweights * momentum)
    ddecay += tl.sum(dmomentum * momentum)
    return dkeep, dcarry, ddecay


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
    as in the forward pass.

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
        if back == chunks - 1:
            target = dbegin_ptr + own * (2 * SIZE)
        store_memory(target, (dw1, db1, dw2, db2), block, CONFIG)
        store_memory(target + SIZE, (ds1, dsb1, ds2, dsb2), block, CONFIG)


@triton.jit(do_not_specialize=COUNTS)
def scan_keys_backward_kernel(
    k_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    states_ptr,
    e_wide_ptr,
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
    tau_ptr,
    rest_ptr,
    dk_norm_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    CONFIG: tl.constexpr,
):
    """One program computes dk of one chunk of one head, and the gradients of the last rows of gamma
    and nu and of the last keep, carry and decay, from the gradient of the memory with which the
    chunk ends. e is a factor of the whole gradient of a token, so its rounding would not average
    out of those of gamma and nu: here it is in fp32. ``tau`` is that of the clip. Of the memory
    and ``rest`` the last keep weighs the difference.
    """
    C: tl.constexpr = CONFIG.C
    D: tl.constexpr = CONFIG.D
    HIDDEN: tl.constexpr = CONFIG.HIDDEN
    SIZE: tl.constexpr = CONFIG.SIZE
    local, own, chunk, place, count, there = chunk_of_program(
        first_chunk, chunks, tokens, heads, CONFIG
    )
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    token = tl.arange(0, CONFIG.BLOCK_C)
    col = tl.arange(0, CONFIG.BLOCK_D)
    written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
    k = token_rows(k_at, place, written, CONFIG)
    gamma, nu, _, _, _ = load_last((gamma_ptr, nu_ptr, reach_ptr), local, count, CONFIG)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    momentum = memory + SIZE
    is_last = local % chunks == chunks - 1
    dmemory = gradient_after(dstate_ptr, dstates_ptr, own, local, is_last, CONFIG)
    dmomentum = dmemory + SIZE
    e = load_matrix(e_wide_ptr + local * (C * D), token, col, C, D)
    if rest_ptr is not None:
        rest = rest_ptr + place[1] * SIZE
    b2 = load_b2(memory, CONFIG)
    if rest_ptr is not None:
        b2 -= load_b2(rest, CONFIG)
    sb2 = load_b2(momentum, CONFIG)
    db2 = load_b2(dmemory, CONFIG)
    dsb2 = load_b2(dmomentum, CONFIG)
    dgamma = -tl.sum(e * db2[None, :], 1)
    dnu = -tl.sum(e * dsb2[None, :], 1)
    to_ends = tl.sum(db2 * b2), tl.sum(db2 * sb2), tl.sum(dsb2 * sb2)
    corner = local * (C * HIDDEN)
    # One layer after the other: both at once would fill the registers.
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        w2 = load_weights(memory, block, 2, CONFIG)
        if rest_ptr is not None:
            w2 -= load_weights(rest, block, 2, CONFIG)
        s2 = load_weights(momentum, block, 2, CONFIG)
        dw2 = load_weights(dmemory, block, 2, CONFIG)
        ds2 = load_weights(dmomentum, block, 2, CONFIG)
        to_ends = add_inner_products(to_ends, w2, s2, dw2, ds2)
        h = load_matrix(h_ptr + corner, token, row, C, HIDDEN)
        dgamma -= tl.sum(e * product(h, dw2.to(k.dtype), CONFIG), 1)
        dnu -= tl.sum(e * product(h, ds2.to(k.dtype), CONFIG), 1)

    dk = load_matrix(dk_read_ptr + local * (C * D), token, col, C, D)
    if tau_ptr is not None:
        tau = load_vector(tau_ptr + local * C, token, C)
        p_squares = tl.zeros_like(tau)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        dw1 = load_weights(dmemory, block, 1, CONFIG)
        ds1 = load_weights(dmomentum, block, 1, CONFIG)
        w1 = load_weights(memory, block, 1, CONFIG)
        s1 = load_weights(momentum, block, 1, CONFIG)
        b1 = load_b1(memory, block, CONFIG)
        moved_w1 = w1
        if rest_ptr is not None:
            moved_w1 = w1 - load_weights(rest, block, 1, CONFIG)
            b1 -= load_b1(rest, block, CONFIG)
        to_ends = add_inner_products(to_ends, moved_w1, s1, dw1, ds1)
        sb1 = load_b1(momentum, block, CONFIG)
        db1 = load_b1(dmemory, block, CONFIG)
        dsb1 = load_b1(dmomentum, block, CONFIG)
        to_ends = add_inner_products(to_ends, b1, sb1, db1, dsb1)
        # p against k dw1^T + db1 is k against p dw1, and p against the biases.
        p = load_matrix(p_ptr + corner, token, row, C, HIDDEN)
        p_wide = p.to(tl.float32)
        by_p = product(p, dw1.to(k.dtype), CONFIG)
        dgamma -= tl.sum(by_p * k.to(tl.float32), 1) + tl.sum(p_wide * db1[None, :], 1)
        dk -= gamma[:, None] * by_p
        by_p = product(p, ds1.to(k.dtype), CONFIG)
        dnu -= tl.sum(by_p * k.to(tl.float32), 1) + tl.sum(p_wide * dsb1[None, :], 1)
        dk -= nu[:, None] * by_p
        dz = load_matrix(dz_ptr + corner, token, row, C, HIDDEN)
        dk += product(dz, w1.to(k.dtype), CONFIG)
        if tau_ptr is not None:
            p_squares += tl.sum(p_wide * p_wide, 1)
    if tau_ptr is not None:
        # Those of a token that is not clipped may overflow.
        dk += tl.where(tau == 0.0, 0.0, tau * p_squares)[:, None] * k.to(tl.float32)
    if CONFIG.RESIDUAL_NORM:
        dk += load_matrix(dk_norm_ptr + local * (C * D), token, col, C, D)
    store_token_rows(dk_ptr, dk, place, there, tokens, heads, CONFIG)
    dlast = dlast_ptr + local * (2 * C) + token
    tl.store(dlast, dgamma, mask=there)
    tl.store(dlast + C, dnu, mask=there)
    for each in tl.static_range(3):
        tl.store(dend_ptr + local * 3 + each, to_ends[each])


@triton.jit(do_not_specialize=COUNTS)
def rest_backward_kernel(
    reach_ptr,
    dstates_ptr,
    dstate_ptr,
    drests_ptr,
    drest_ptr,
    chunks,
    CONFIG: tl.constexpr,
):
    """One program adds to REST_NUMBERS numbers of one head's ``drest`` [SIZE] what comes through
    the reads of ``chunks`` chunks and through their ends: 1 - keep times the gradient of the memory
    with which each ends.
    """
    C: tl.constexpr = CONFIG.C
    SIZE: tl.constexpr = CONFIG.SIZE
    blocks = tl.cdiv(SIZE, REST_NUMBERS)
    own = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(0) % blocks * REST_NUMBERS + tl.arange(0, REST_NUMBERS)
    inside = number < SIZE
    total = tl.load(drest_ptr + own * SIZE + number, mask=inside)
    for back in tl.range(0, chunks):
        local = own * chunks + (chunks - 1 - back)
        is_last = back == 0
        dmemory = gradient_after(dstate_ptr, dstates_ptr, own, local, is_last, CONFIG)
        lost = 1.0 - tl.load(reach_ptr + local * (3 * C) + C - 1)
        total += lost * tl.load(dmemory + number, mask=inside)
        total += tl.load(drests_ptr + local * SIZE + number, mask=inside)
    tl.store(drest_ptr + own * SIZE + number, total, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def decays_backward_kernel(
    alpha_ptr,
    eta_ptr,
    written_ptr,
    gamma_ptr,
    nus_ptr,
    reach_ptr,
    dgamma_ptr,
    dreach_ptr,
    dlast_ptr,
    dend_ptr,
    dalpha_ptr,
    deta_ptr,
    dtheta_ptr,
    tokens,
    heads,
    first_chunk,
    chunks,
    CONFIG: tl.constexpr,
):
    """One program computes the gradients of the gates of one chunk of one head, from its last token
    to its first. Gradients arrive from the reads (of gamma [C, C]; of keep and carry, as [2, C]),
    SHIFT rows further down, and from the chunk's end (of the last rows of gamma and nu, as [2, C];
    of the last keep, carry and decay).
    """
    C: tl.constexpr = CONFIG.C
    local = tl.program_id(0).to(tl.int64)
    batch = local // chunks // heads
    head = local // chunks % heads
    first = (first_chunk + local % chunks) * C
    count = tl.minimum(tokens - first, C).to(tl.int32)
    col = tl.arange(0, CONFIG.BLOCK_C)
    gates_at = (batch * tokens + first) * heads + head
    rows_at = local * (C * C) + col
    reach = reach_ptr + local * (3 * C)
    dreach = dreach_ptr + local * (2 * C)
    dlast = dlast_ptr + local * (2 * C) + col

    # Gradients of the rows after token t, from all that comes later.
    to_gamma = tl.load(dlast, mask=col < count, other=0.0)
    to_nu = tl.load(dlast + C, mask=col < count, other=0.0)
    to_keep = tl.load(dend_ptr + local * 3)
    to_carry = tl.load(dend_ptr + local * 3 + 1)
    to_decay = tl.load(dend_ptr + local * 3 + 2)
    for start in tl.range(0, count, TOKENS_AT_ONCE):
        gates = ()
        from_reads = ()
        before_token = ()
        for i in tl.static_range(TOKENS_AT_ONCE):
            t = count - 1 - start - i
            read = t + CONFIG.SHIFT
            inside = t >= 0
            has_read = inside & (read < count)
            read_cols = has_read & (col < count)
            dgamma = tl.load(dgamma_ptr + rows_at + read * C, mask=read_cols, other=0.0)
            dkeep = tl.load(dreach + read, mask=has_read, other=0.0)
            dcarry = tl.load(dreach + C + read, mask=has_read, other=0.0)
            written = inside
            at = gates_at + t * heads
            if written_ptr is not None:
                written = inside & (tl.load(written_ptr + at, mask=inside, other=0) != 0)
            forget = 1.0 - tl.load(alpha_ptr + at, mask=written, other=0.0)
            eta = tl.load(eta_ptr + at, mask=written, other=1.0)
            # The rows after the token before; before the first one nothing was written.
            before = t > 0
            gamma = tl.load(gamma_ptr + rows_at + (t - 1) * C, mask=before & (col < C), other=0.0)
            nu = tl.load(nus_ptr + rows_at + (t - 1) * C, mask=before & (col < C), other=0.0)
            keep = tl.load(reach + t - 1, mask=before, other=1.0)
            carry = tl.load(reach + C + t - 1, mask=before, other=0.0)
            decay = tl.load(reach + 2 * C + t - 1, mask=before, other=1.0)
            gates += ((written, forget, eta),)  # type: ignore[assignment]
            from_reads += ((dgamma, dkeep, dcarry),)  # type: ignore[assignment]
            before_token += ((gamma, nu, keep, carry, decay),)  # type: ignore[assignment]
        for i in tl.static_range(TOKENS_AT_ONCE):
            t = count - 1 - start - i
            written, forget, eta = gates[i]
            dgamma, dkeep, dcarry = from_reads[i]
            gamma, nu, keep, carry, decay = before_token[i]
            to_gamma += dgamma
            to_keep += dkeep
            to_carry += dcarry
            to_nu += tl.where(written, to_gamma, 0.0)
            to_decay += tl.where(written, to_carry, 0.0)
            dalpha = -(tl.sum(to_gamma * gamma) + to_keep * keep + to_carry * carry)
            deta = tl.sum(to_nu * nu) + to_decay * decay
            dtheta = tl.sum(tl.where(col == t, to_nu, 0.0))
            at = gates_at + t * heads
            tl.store(dalpha_ptr + at, tl.where(written, dalpha, 0.0), mask=t >= 0)
            tl.store(deta_ptr + at, tl.where(written, deta, 0.0), mask=t >= 0)
            tl.store(dtheta_ptr + at, tl.where(written, dtheta, 0.0), mask=t >= 0)
            to_gamma *= forget
            to_keep *= forget
            to_carry *= forget
            to_nu *= eta
            to_decay *= eta
