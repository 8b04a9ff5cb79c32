"""Triton kernels of the last part of the scan's backward pass, from the gradients of the memories
with which the chunks end: keys and ends of all chunks at once, the rest, and the gates.
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
    store_token_rows,
    token_rows,
)
from .tiles import (
    COUNTS,
    TOKENS_AT_ONCE,
    chunk_of_program,
    load_last,
    load_written,
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
