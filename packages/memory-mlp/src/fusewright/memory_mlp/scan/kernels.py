"""Triton kernels of the scan's forward pass, in the order in which they run.

Of one chunk of C tokens, with W and S those with which it begins and G_j = (p_j k_j^T, p_j, e_j
h_j^T, e_j) the gradient of token j:

    W_t = keep_t W + (1 - keep_t) R + carry_t S - sum over j <= t of gamma_tj G_j
    S_t = decay_t S - sum over j <= t of nu_tj G_j                   gates alone make the factors
    z = k w1^T + b1    h = act(z)    e = 2 (h w2^T + b2 - v)    p = (e w2) * act'(z)
    W, S of the next chunk = W_t, S_t of the last token              chunk after chunk
    z_q = keep (q w1^T + b1) + carry (q s1^T + c1) - (gamma * (q k^T + 1)) p
    h_q = act(z_q)                                                   all chunks at once
    y = keep (h_q w2^T + b2) + carry (h_q s2^T + c2) - (gamma * (h_q h^T + 1)) e

and 1 - keep times the layers of R, where there is one. With RESIDUAL_NORM y = q + N(y), and e is
the gradient through k + N of the layers' output.

With a clip ``kernels_clip`` goes from chunk to chunk, and e and p are multiplied by the factors
that it has found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    activated,
    load_b1,
    load_b2,
    load_matrix,
    load_weights,
    product,
    product_onto,
    store_matrix,
    store_memory,
    store_token_rows,
    token_rows,
    zeros,
)
from .tiles import (
    COUNTS,
    TOKENS_AT_ONCE,
    chunk_of_program,
    hidden_of,
    hypotenuse,
    inner_gradient,
    is_reset,
    load_last,
    load_memory,
    load_seen,
    load_written,
    normalised,
    norms_of_rows,
    store_part,
    sum_of_programs,
    sums,
    token_numbers,
)


@triton.jit(do_not_specialize=COUNTS)
def decays_kernel(
    alpha_ptr,
    eta_ptr,
    theta_ptr,
    written_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    nus_ptr,
    arrived_ptr,
    tokens,
    heads,
    first_chunk,
    chunks,
    CONFIG: tl.constexpr,
):
    """One program computes gamma [C, C], the last row of nu (in ``nus`` all of it), and keep, carry
    and decay [C] of one chunk of one head, row after row. Gates are [B, tokens, heads]; ``chunks``
    chunks of every head from ``first_chunk`` on are computed. Tokens past the end keep
    everything, so that the last row is that of the last token. The count of programs that have
    arrived at a step of ``scan_states_kernel`` is set to 0.
    """
    C: tl.constexpr = CONFIG.C
    BLOCK_C: tl.constexpr = CONFIG.BLOCK_C
    local = tl.program_id(0).to(tl.int64)
    if arrived_ptr is not None:
        tl.store(arrived_ptr + local // chunks, 0)
    batch = local // chunks // heads
    head = local // chunks % heads
    first = (first_chunk + local % chunks) * C
    col = tl.arange(0, BLOCK_C)
    gates_at = (batch * tokens + first) * heads + head
    reach_at = reach_ptr + local * (3 * C)
    rows_at = local * (C * C) + col

    gamma = tl.zeros([BLOCK_C], tl.float32)
    nu = tl.zeros([BLOCK_C], tl.float32)
    keep = 1.0
    carry = 0.0
    decay = 1.0
    for start in tl.range(0, C, TOKENS_AT_ONCE):
        gates = ()
        for i in tl.static_range(TOKENS_AT_ONCE):
            at = gates_at + (start + i) * heads
            written = (first + start + i < tokens) & (start + i < C)
            if written_ptr is not None:
                written = written & (tl.load(written_ptr + at, mask=written, other=0) != 0)
            forget = 1.0 - tl.load(alpha_ptr + at, mask=written, other=0.0)
            eta = tl.load(eta_ptr + at, mask=written, other=1.0)
            theta = tl.load(theta_ptr + at, mask=written, other=0.0)
            gates += ((written, forget, eta, theta),)  # type: ignore[assignment]
        for i in tl.static_range(TOKENS_AT_ONCE):
            t = start + i
            written, forget, eta, theta = gates[i]
            nu = tl.where(col == t, theta, eta * nu)
            decay *= eta
            gamma = forget * gamma + tl.where(written, nu, 0.0)
            carry = forget * carry + tl.where(written, decay, 0.0)
            keep *= forget
            inside = t < C
            tl.store(gamma_ptr + rows_at + t * C, gamma, mask=(col < C) & inside)
            if nus_ptr is not None:
                tl.store(nus_ptr + rows_at + t * C, nu, mask=(col < C) & inside)
            tl.store(reach_at + t, keep, mask=inside)
            tl.store(reach_at + C + t, carry, mask=inside)
            tl.store(reach_at + 2 * C + t, decay, mask=inside)
    tl.store(nu_ptr + local * C + col, nu, mask=col < C)


@triton.jit(do_not_specialize=COUNTS)
def scan_states_kernel(
    k_ptr,
    v_ptr,
    written_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    state_ptr,
    rest_ptr,
    resets_ptr,
    states_ptr,
    end_ptr,
    parts_ptr,
    arrived_ptr,
    tokens,
    heads,
    all_heads,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    CONFIG: tl.constexpr,
):
    """One program carries BLOCK_H hidden units of the memory and the momentum of one head over all
    chunks; with the other BLOCKS - 1 programs of its head it adds up the memory's outputs for
    the keys. It starts from ``state``, forgets towards ``rest`` [heads, SIZE] or zero, and writes
    the state with which each chunk began, ``states`` [chunks, heads of all rows, 2, SIZE], and that
    with which the last one ended, ``end``. Chunks that ``resets`` names begin with ``state`` again.

    Weights are held as [BLOCK_D, BLOCK_H]: every tile has the rows that a group of four warps
    takes, however few hidden units a program has, so that more programs can work on a head.
    """
    C: tl.constexpr = CONFIG.C
    SIZE: tl.constexpr = CONFIG.SIZE
    own = (tl.program_id(0) // CONFIG.BLOCKS).to(tl.int64)
    block = tl.program_id(0) % CONFIG.BLOCKS
    batch = own // heads
    head = own % heads
    k_at = k_ptr, k_batch_stride, k_token_stride, k_head_stride
    v_at = v_ptr, v_batch_stride, v_token_stride, v_head_stride
    chunks = tl.cdiv(tokens, C)
    memory = state_ptr + own * (2 * SIZE)
    w1, b1, w2, b2 = load_memory(memory, block, CONFIG)
    s1, sb1, s2, sb2 = load_memory(memory + SIZE, block, CONFIG)
    for chunk in tl.range(0, chunks, num_stages=1):
        if resets_ptr is not None:
            memory = state_ptr + own * (2 * SIZE)
            if is_reset(resets_ptr, batch, chunk, tokens, CONFIG):
                w1, b1, w2, b2 = load_memory(memory, block, CONFIG)
                s1, sb1, s2, sb2 = load_memory(memory + SIZE, block, CONFIG)
        first = chunk * C
        place = batch, head, first
        count = tl.minimum(tokens - first, C)
        there = tl.arange(0, CONFIG.BLOCK_C) < count
        written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
        k = token_rows(k_at, place, written, CONFIG)
        v = token_rows(v_at, place, written, CONFIG)
        local = own * chunks + chunk
        gamma, nu, keep, carry, decay = load_last(
            (gamma_ptr, nu_ptr, reach_ptr), local, count, CONFIG
        )
        z = product(k, w1.to(k.dtype), CONFIG) + b1[None, :]  # [BLOCK_C, BLOCK_H]
        h, slope, _ = activated(z, CONFIG)
        w2_rounded = w2.to(k.dtype)
        read = product(h.to(k.dtype), tl.trans(w2_rounded), CONFIG)  # [BLOCK_C, BLOCK_D]
        # Work that needs no other program stands between storing the part and loading the sum.
        if CONFIG.BLOCKS > 1:
            store_part(read, parts_ptr, arrived_ptr, own, block, chunk, CONFIG)
        memory = states_ptr + (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
        store_memory(memory, (w1, b1, w2, b2), block, CONFIG)
        store_memory(memory + SIZE, (s1, sb1, s2, sb2), block, CONFIG)
        w1, s1 = keep * w1 + carry * s1, decay * s1
        w2, s2 = keep * w2 + carry * s2, decay * s2
        b1, sb1 = keep * b1 + carry * sb1, decay * sb1
        after_b2, sb2 = keep * b2 + carry * sb2, decay * sb2
        if rest_ptr is not None:
            r1, rb1, r2, rb2 = load_memory(rest_ptr + head * SIZE, block, CONFIG)
            w1 += (1.0 - keep) * r1
            w2 += (1.0 - keep) * r2
            b1 += (1.0 - keep) * rb1
            after_b2 += (1.0 - keep) * rb2
        if CONFIG.BLOCKS > 1:
            read = sum_of_programs(parts_ptr, arrived_ptr, own, chunk, CONFIG)
        e, _ = inner_gradient(read + b2[None, :], k, v, written, CONFIG)
        e_rounded = e.to(k.dtype)
        p = product(e_rounded, w2_rounded, CONFIG) * slope

        # Rows of the gradients, times the factor with which each reaches the chunk's end.
        h_rounded = h.to(k.dtype)
        to_memory = -gamma[:, None] * e
        to_momentum = -nu[:, None] * e
        w2 = product_onto(w2, tl.trans(to_memory.to(k.dtype)), h_rounded, CONFIG)
        s2 = product_onto(s2, tl.trans(to_momentum.to(k.dtype)), h_rounded, CONFIG)
        to_memory, to_momentum = sums(to_memory, to_momentum)
        b2 = after_b2 + to_memory
        sb2 += to_momentum
        k_transposed = tl.trans(k)
        to_memory = -gamma[:, None] * p
        to_momentum = -nu[:, None] * p
        w1 = product_onto(w1, k_transposed, to_memory.to(k.dtype), CONFIG)
        s1 = product_onto(s1, k_transposed, to_momentum.to(k.dtype), CONFIG)
        to_memory, to_momentum = sums(to_memory, to_momentum)
        b1 += to_memory
        sb1 += to_momentum
    memory = end_ptr + own * (2 * SIZE)
    store_memory(memory, (w1, b1, w2, b2), block, CONFIG)
    store_memory(memory + SIZE, (s1, sb1, s2, sb2), block, CONFIG)


@triton.jit(do_not_specialize=COUNTS)
def scan_read_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    written_ptr,
    gamma_ptr,
    reach_ptr,
    states_ptr,
    rest_ptr,
    y_ptr,
    loss_ptr,
    e_ptr,
    e_wide_ptr,
    h_ptr,
    slope_ptr,
    curve_ptr,
    p_ptr,
    read_h_ptr,
    read_slope_ptr,
    matches_ptr,
    output_ptr,
    read_output_ptr,
    pull_ptr,
    factors_ptr,
    tokens,
    heads,
    all_heads,
    first_chunk,
    chunks,
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
    """One program reads for the queries of one chunk of one head; ``chunks`` chunks of every head
    from ``first_chunk`` on are read. It writes y and ``loss`` [B, tokens, heads], |M(k) - v|^2 at
    the weights with which the chunk began; with ``e``, instead, what the backward pass needs of the
    keys (e [C, D], rounded and in fp32; h, act'(z), dh act''(z) and p [C, HIDDEN]) and of the reads
    (h and act'(z) [C, HIDDEN], and how the hidden layers match [C, C]); with RESIDUAL_NORM also
    what the layers make of both, ``output`` and ``read_output`` [C, D].

    With ``factors``, by which e is multiplied, and ``e``, also ``pull`` [C, D]: half the gradient
    of the square of the norm of a token's gradient by e, p being a function of e.
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
    v_at = v_ptr, v_batch_stride, v_token_stride, v_head_stride
    q_at = q_ptr, q_batch_stride, q_token_stride, q_head_stride
    token = tl.arange(0, BLOCK_C)
    col = tl.arange(0, CONFIG.BLOCK_D)
    written = load_written(written_ptr, place, there, tokens, heads, CONFIG)
    if factors_ptr is not None:
        at = token_numbers(factors_ptr, place, there, tokens, heads, CONFIG)
        factor = tl.load(at, mask=there, other=0.0)
        written = written & (factor != 0.0)
    k = token_rows(k_at, place, written, CONFIG)
    v = token_rows(v_at, place, written, CONFIG)
    q = token_rows(q_at, place, there, CONFIG)
    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, CONFIG)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    momentum = memory + SIZE
    rest = rest_ptr
    if rest_ptr is not None:
        rest = rest_ptr + place[1] * SIZE
    output = zeros(BLOCK_C, CONFIG.BLOCK_D)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        z = hidden_of(k, memory, block, CONFIG)
        w2 = load_weights(memory, block, 2, CONFIG).to(k.dtype)
        h, _, _ = activated(z, CONFIG)
        output = product_onto(output, h.to(k.dtype), w2, CONFIG)
    output += load_b2(memory, CONFIG)[None, :]
    if output_ptr is not None:
        store_matrix(output_ptr + local * (C * D), output, token, col, C, D)
    e, residual = inner_gradient(output, k, v, written, CONFIG)
    if loss_ptr is not None:
        at = token_numbers(loss_ptr, place, there, tokens, heads, CONFIG)
        tl.store(at, tl.sum(residual * residual, 1), mask=there)
    if factors_ptr is not None:
        e = e * factor[:, None]
    if e_ptr is not None:
        store_matrix(e_wide_ptr + local * (C * D), e, token, col, C, D)
    e = e.to(k.dtype)
    by_p = product(q, tl.trans(k), CONFIG)  # [BLOCK_C, BLOCK_C]
    # The ones carry the biases.
    by_p = (-(by_p + 1.0) * gamma).to(k.dtype)
    q_kept = (keep * q.to(tl.float32)).to(k.dtype)
    q_carried = (carry * q.to(tl.float32)).to(k.dtype)
    matches = tl.full([BLOCK_C, BLOCK_C], 1.0, tl.float32)
    y = zeros(BLOCK_C, CONFIG.BLOCK_D)
    if pull_ptr is not None:
        by_p_slope = zeros(BLOCK_C, CONFIG.BLOCK_D)
        # The one is the bias's.
        h_norm = tl.full([BLOCK_C], 1.0, tl.float32)
    corner = local * (C * HIDDEN)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        w1 = tl.trans(load_weights(memory, block, 1, CONFIG).to(k.dtype))
        b1 = load_b1(memory, block, CONFIG)[None, :]
        z = product(k, w1, CONFIG) + b1
        h, slope, curve = activated(z, CONFIG)
        h = h.to(k.dtype)
        w2 = load_weights(memory, block, 2, CONFIG).to(k.dtype)
        dh = product(e, tl.trans(w2), CONFIG)
        p = (dh * slope).to(k.dtype)
        if e_ptr is not None:
            store_matrix(h_ptr + corner, h, token, row, C, HIDDEN)
            store_matrix(slope_ptr + corner, slope.to(k.dtype), token, row, C, HIDDEN)
            curve = (dh * curve).to(k.dtype)
            store_matrix(curve_ptr + corner, curve, token, row, C, HIDDEN)
            store_matrix(p_ptr + corner, p, token, row, C, HIDDEN)
            if pull_ptr is not None:
                by_p_slope = product_onto(by_p_slope, (dh * slope * slope).to(k.dtype), w2, CONFIG)
                h_norm = hypotenuse(h_norm, norms_of_rows(h.to(tl.float32)))

        s1 = tl.trans(load_weights(momentum, block, 1, CONFIG).to(k.dtype))
        sb1 = load_b1(momentum, block, CONFIG)[None, :]
        z = product(q_kept, w1, CONFIG)  # [BLOCK_C, BLOCK_H]
        z = product_onto(z, q_carried, s1, CONFIG)
        b1 = keep * b1 + carry * sb1
        if rest_ptr is not None:
            r1 = tl.trans(load_weights(rest, block, 1, CONFIG).to(k.dtype))
            z = product_onto(z, ((1.0 - keep) * q.to(tl.float32)).to(k.dtype), r1, CONFIG)
            b1 += (1.0 - keep) * load_b1(rest, block, CONFIG)[None, :]
        z = product_onto(z, by_p, p, CONFIG) + b1
        h_q, slope_q, _ = activated(z, CONFIG)
        matches = product_onto(matches, h_q.to(k.dtype), tl.trans(h), CONFIG)
        if e_ptr is not None:
            store_matrix(read_h_ptr + corner, h_q.to(k.dtype), token, row, C, HIDDEN)
            store_matrix(read_slope_ptr + corner, slope_q.to(k.dtype), token, row, C, HIDDEN)
        if e_ptr is None or CONFIG.RESIDUAL_NORM:
            s2 = load_weights(momentum, block, 2, CONFIG).to(k.dtype)
            y = product_onto(y, (keep * h_q).to(k.dtype), w2, CONFIG)
            y = product_onto(y, (carry * h_q).to(k.dtype), s2, CONFIG)
            if rest_ptr is not None:
                r2 = load_weights(rest, block, 2, CONFIG).to(k.dtype)
                y = product_onto(y, ((1.0 - keep) * h_q).to(k.dtype), r2, CONFIG)
    if e_ptr is None or CONFIG.RESIDUAL_NORM:
        # Loaded again: held since the start, they would fill the registers.
        gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, CONFIG)
        y = product_onto(y, (-matches * gamma).to(k.dtype), e, CONFIG)
        y += keep * load_b2(memory, CONFIG)[None, :]
        y += carry * load_b2(momentum, CONFIG)[None, :]
        if rest_ptr is not None:
            y += (1.0 - keep) * load_b2(rest, CONFIG)[None, :]
    if e_ptr is not None:
        if CONFIG.RESIDUAL_NORM:
            store_matrix(read_output_ptr + local * (C * D), y, token, col, C, D)
        store_matrix(e_ptr + local * (C * D), e, token, col, C, D)
        store_matrix(matches_ptr + local * (C * C), matches, token, token, C, C)
        if pull_ptr is not None:
            k_norm = hypotenuse(
                norms_of_rows(k.to(tl.float32)), tl.full([BLOCK_C], 1.0, tl.float32)
            )
            # All threads have stored it.
            tl.debug_barrier()
            e = load_matrix(e_wide_ptr + local * (C * D), token, col, C, D)
            # Squares of the norms of an outlier would overflow.
            pull = h_norm[:, None] * (h_norm[:, None] * e)
            pull += k_norm[:, None] * (k_norm[:, None] * by_p_slope)
            store_matrix(pull_ptr + local * (C * D), pull, token, col, C, D)
    else:
        if CONFIG.RESIDUAL_NORM:
            n, _ = normalised(y, CONFIG)
            y = q.to(tl.float32) + n
        store_token_rows(y_ptr, y, place, there, tokens, heads, CONFIG)
