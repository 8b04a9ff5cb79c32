"""The forward pass of the scan: weights and momentum, chunk by chunk; then all reads at once."""

from __future__ import annotations

import triton
import triton.language as tl

from ._scan_decays_kernels import COUNTS
from ._scan_tiles import (
    FACTOR,
    hand_in,
    hidden_of,
    load_b1,
    load_b2,
    load_memory,
    load_weights,
    load_written,
    product,
    product_onto,
    store_matrix,
    store_memory,
    store_token_rows,
    sum_of_all,
    sums,
    token_rows,
)
from ._update_tiles import activated


@triton.jit
def load_last(
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    local,
    count,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(gamma, nu, keep, carry, decay) as the end of a chunk sees them: those of its last token."""
    token = tl.arange(0, BLOCK_C)
    row = local * (C * C) + (C - 1) * C + token
    gamma = tl.load(gamma_ptr + row, mask=token < count, other=0.0)
    nu = tl.load(nu_ptr + local * C + token, mask=token < count, other=0.0)
    end = reach_ptr + local * (3 * C) + C - 1
    return gamma, nu, tl.load(end), tl.load(end + C), tl.load(end + 2 * C)


@triton.jit(do_not_specialize=COUNTS)
def _scan_states_kernel(
    k_ptr,
    v_ptr,
    written_ptr,
    gamma_ptr,
    nu_ptr,
    reach_ptr,
    state_ptr,
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
    HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program carries BLOCK_H hidden units of the memory and the momentum of one head over all
    chunks; with the BLOCKS programs of its head it shares what the memory returns for the keys.
    It starts from ``state`` and writes with what every chunk began, ``states`` [chunks, heads of
    all rows, 2, SIZE], and with what the last one ended, ``end``.

    Weights are held as [BLOCK_D, BLOCK_H]. So every tile has the rows that a group of four warps
    takes, however few hidden units a program has, and the more programs share a head.
    """
    SIZE: tl.constexpr = 2 * HIDDEN * D + HIDDEN + D
    own = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    batch = own // heads
    head = own % heads
    chunks = tl.cdiv(tokens, C)
    memory = state_ptr + own * (2 * SIZE)
    w1, b1, w2, b2 = load_memory(memory, block, D, HIDDEN, BLOCK_D, BLOCK_H)
    s1, sb1, s2, sb2 = load_memory(memory + SIZE, block, D, HIDDEN, BLOCK_D, BLOCK_H)
    for chunk in tl.range(0, chunks, num_stages=1):
        first = chunk * C
        count = tl.minimum(tokens - first, C)
        there = tl.arange(0, BLOCK_C) < count
        written = load_written(
            written_ptr, batch, head, first, there, tokens, heads, HAS_MASK, BLOCK_C
        )
        k = token_rows(
            k_ptr, k_batch_stride, k_token_stride, k_head_stride,
            batch, head, first, written, D, BLOCK_C, BLOCK_D,
        )  # fmt: skip
        v = token_rows(
            v_ptr, v_batch_stride, v_token_stride, v_head_stride,
            batch, head, first, written, D, BLOCK_C, BLOCK_D,
        )  # fmt: skip
        local = own * chunks + chunk
        gamma, nu, keep, carry, decay = load_last(
            gamma_ptr, nu_ptr, reach_ptr, local, count, C, BLOCK_C
        )
        z = product(k, w1.to(k.dtype), UPCAST, PRECISION) + b1[None, :]
        h, slope, _ = activated(z, ACTIVATION)
        w2_rounded = w2.to(k.dtype)
        read = product(h.to(k.dtype), tl.trans(w2_rounded), UPCAST, PRECISION)
        # What does not need the others is between handing in and asking for the sum.
        if BLOCKS > 1:
            hand_in(read, parts_ptr, arrived_ptr, own, block, chunk, BLOCKS, BLOCK_C, BLOCK_D)
        memory = states_ptr + (tl.cast(chunk, tl.int64) * all_heads + own) * (2 * SIZE)
        store_memory(memory, w1, b1, w2, b2, block, D, HIDDEN, BLOCK_D, BLOCK_H)
        store_memory(memory + SIZE, s1, sb1, s2, sb2, block, D, HIDDEN, BLOCK_D, BLOCK_H)
        w1, s1 = keep * w1 + carry * s1, decay * s1
        w2, s2 = keep * w2 + carry * s2, decay * s2
        if BLOCKS > 1:
            read = sum_of_all(parts_ptr, arrived_ptr, own, chunk, BLOCKS, BLOCK_C, BLOCK_D)
        e = FACTOR * (read + b2[None, :] - v.to(tl.float32))
        e = tl.where(written[:, None], e, 0.0)
        e_rounded = e.to(k.dtype)
        p = product(e_rounded, w2_rounded, UPCAST, PRECISION) * slope

        # The rows of what is learned, as much of each as is left at the chunk's end.
        h_rounded = h.to(k.dtype)
        to_memory = -gamma[:, None] * e
        to_momentum = -nu[:, None] * e
        w2 = product_onto(w2, tl.trans(to_memory.to(k.dtype)), h_rounded, UPCAST, PRECISION)
        s2 = product_onto(s2, tl.trans(to_momentum.to(k.dtype)), h_rounded, UPCAST, PRECISION)
        to_memory, to_momentum = sums(to_memory, to_momentum)
        b2 = keep * b2 + carry * sb2 + to_memory
        sb2 = decay * sb2 + to_momentum
        turned = tl.trans(k)
        to_memory = -gamma[:, None] * p
        to_momentum = -nu[:, None] * p
        w1 = product_onto(w1, turned, to_memory.to(k.dtype), UPCAST, PRECISION)
        s1 = product_onto(s1, turned, to_momentum.to(k.dtype), UPCAST, PRECISION)
        to_memory, to_momentum = sums(to_memory, to_momentum)
        b1 = keep * b1 + carry * sb1 + to_memory
        sb1 = decay * sb1 + to_momentum
    memory = end_ptr + own * (2 * SIZE)
    store_memory(memory, w1, b1, w2, b2, block, D, HIDDEN, BLOCK_D, BLOCK_H)
    store_memory(memory + SIZE, s1, sb1, s2, sb2, block, D, HIDDEN, BLOCK_D, BLOCK_H)


@triton.jit
def load_seen(
    gamma_ptr,
    reach_ptr,
    local,
    count,
    SHIFT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(gamma, keep, carry) as the reads of a chunk see them: each row that of its own token, or
    with SHIFT of the one before, whose first is what the chunk began with.
    """
    row = tl.arange(0, BLOCK_C) - SHIFT
    inside = (row >= 0) & (row < count)
    col = tl.arange(0, BLOCK_C)
    at = gamma_ptr + local * (C * C) + row[:, None] * C + col[None, :]
    gamma = tl.load(at, mask=inside[:, None] & (col < count)[None, :], other=0.0)
    reach = reach_ptr + local * (3 * C) + row
    keep = tl.load(reach, mask=inside, other=1.0)
    carry = tl.load(reach + C, mask=inside, other=0.0)
    return gamma, keep[:, None], carry[:, None]


@triton.jit(do_not_specialize=COUNTS)
def _scan_read_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    written_ptr,
    gamma_ptr,
    reach_ptr,
    states_ptr,
    y_ptr,
    e_ptr,
    e_wide_ptr,
    h_ptr,
    slope_ptr,
    curve_ptr,
    p_ptr,
    read_h_ptr,
    read_slope_ptr,
    matches_ptr,
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
    HAS_MASK: tl.constexpr,
    KEEP: tl.constexpr,
    SHIFT: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program reads for the queries of one chunk of one head; ``chunks`` chunks of every head
    from ``first_chunk`` on are read. With KEEP it writes, instead of y, what the backward pass
    wants of the keys (e [C, D], rounded and in fp32; h, act'(z), dh act''(z) and p [C, HIDDEN]) and
    of the reads (h and act'(z) [C, HIDDEN], and how the hidden layers match [C, C]).
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
    v = token_rows(
        v_ptr, v_batch_stride, v_token_stride, v_head_stride,
        batch, head, first, written, D, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    q = token_rows(
        q_ptr, q_batch_stride, q_token_stride, q_head_stride,
        batch, head, first, there, D, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, SHIFT, C, BLOCK_C)
    memory = states_ptr + (chunk * all_heads + own) * (2 * SIZE)
    momentum = memory + SIZE
    e = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        z = hidden_of(k, memory, block, UPCAST, PRECISION, D, HIDDEN, BLOCK_D, BLOCK_H)
        w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H).to(k.dtype)
        h, _, _ = activated(z, ACTIVATION)
        e = product_onto(e, h.to(k.dtype), w2, UPCAST, PRECISION)
    e = FACTOR * (e + load_b2(memory, D, HIDDEN, BLOCK_D)[None, :] - v.to(tl.float32))
    e = tl.where(written[:, None], e, 0.0)
    if KEEP:
        store_matrix(e_wide_ptr + local * (C * D), e, token, col, C, D)
    e = e.to(k.dtype)
    by_p = product(q, tl.trans(k), UPCAST, PRECISION)
    # The ones carry the biases.
    by_p = (-(by_p + 1.0) * gamma).to(k.dtype)
    q_kept = (keep * q.to(tl.float32)).to(k.dtype)
    q_carried = (carry * q.to(tl.float32)).to(k.dtype)
    matches = tl.full([BLOCK_C, BLOCK_C], 1.0, tl.float32)
    y = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    corner = local * (C * HIDDEN)
    for block in tl.range(0, BLOCKS, num_stages=1):
        row = block * BLOCK_H + tl.arange(0, BLOCK_H)
        w1 = tl.trans(load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H).to(k.dtype))
        b1 = load_b1(memory, block, D, HIDDEN, BLOCK_H)[None, :]
        z = product(k, w1, UPCAST, PRECISION) + b1
        h, slope, curve = activated(z, ACTIVATION)
        h = h.to(k.dtype)
        w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H).to(k.dtype)
        dh = product(e, tl.trans(w2), UPCAST, PRECISION)
        p = (dh * slope).to(k.dtype)
        if KEEP:
            store_matrix(h_ptr + corner, h, token, row, C, HIDDEN)
            store_matrix(slope_ptr + corner, slope.to(k.dtype), token, row, C, HIDDEN)
            curve = (dh * curve).to(k.dtype)
            store_matrix(curve_ptr + corner, curve, token, row, C, HIDDEN)
            store_matrix(p_ptr + corner, p, token, row, C, HIDDEN)

        s1 = tl.trans(load_weights(momentum, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H).to(k.dtype))
        sb1 = load_b1(momentum, block, D, HIDDEN, BLOCK_H)[None, :]
        z = product(q_kept, w1, UPCAST, PRECISION)
        z = product_onto(z, q_carried, s1, UPCAST, PRECISION)
        z = product_onto(z, by_p, p, UPCAST, PRECISION) + (keep * b1 + carry * sb1)
        h_q, slope_q, _ = activated(z, ACTIVATION)
        matches = product_onto(matches, h_q.to(k.dtype), tl.trans(h), UPCAST, PRECISION)
        if KEEP:
            store_matrix(read_h_ptr + corner, h_q.to(k.dtype), token, row, C, HIDDEN)
            store_matrix(read_slope_ptr + corner, slope_q.to(k.dtype), token, row, C, HIDDEN)
        else:
            s2 = load_weights(momentum, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H).to(k.dtype)
            y = product_onto(y, (keep * h_q).to(k.dtype), w2, UPCAST, PRECISION)
            y = product_onto(y, (carry * h_q).to(k.dtype), s2, UPCAST, PRECISION)
    if KEEP:
        store_matrix(e_ptr + local * (C * D), e, token, col, C, D)
        store_matrix(matches_ptr + local * (C * C), matches, token, token, C, C)
    else:
        # Loaded again, or it would fill the registers all along.
        gamma, keep, carry = load_seen(gamma_ptr, reach_ptr, local, count, SHIFT, C, BLOCK_C)
        y = product_onto(y, (-matches * gamma).to(k.dtype), e, UPCAST, PRECISION)
        y += keep * load_b2(memory, D, HIDDEN, BLOCK_D)[None, :]
        y += carry * load_b2(momentum, D, HIDDEN, BLOCK_D)[None, :]
        store_token_rows(y_ptr, y, batch, head, first, there, tokens, heads, D, BLOCK_C, BLOCK_D)
