"""What the gates of a chunk make of the weights, the momentum and the gradients of its tokens
(``Decays`` in scan_reference.py), and the gates' gradients. Products of gates are taken one after
the other, so that gates of exactly 0 and 1 are right; nothing is divided by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One machine code serves all lengths and all parts of a pass.
COUNTS = ("tokens", "heads", "all_heads", "first_chunk", "chunks")
# Tokens whose numbers are read together: no read passes a write that stands before it, and the wait
# for one read is longer than all else that is done for a token.
TOGETHER = tl.constexpr(8)


@triton.jit(do_not_specialize=COUNTS)
def _decays_kernel(
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
    HAS_MASK: tl.constexpr,
    KEEP: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program computes gamma [C, C], the last row of nu (with KEEP all of it), and keep, carry
    and decay [C] of one chunk of one head, row after row. Gates are [B, tokens, heads]; ``chunks``
    chunks of every head from ``first_chunk`` on are computed. Tokens that are not there keep
    everything, so that the last row is that of the last token. Whoever shares a head in the next
    launches finds that nobody has arrived.
    """
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
    for start in tl.range(0, C, TOGETHER):
        gates = ()
        for i in tl.static_range(TOGETHER):
            at = gates_at + (start + i) * heads
            written = (first + start + i < tokens) & (start + i < C)
            if HAS_MASK:
                written = written & (tl.load(written_ptr + at, mask=written, other=0) != 0)
            forget = 1.0 - tl.load(alpha_ptr + at, mask=written, other=0.0)
            eta = tl.load(eta_ptr + at, mask=written, other=1.0)
            theta = tl.load(theta_ptr + at, mask=written, other=0.0)
            gates += ((written, forget, eta, theta),)  # type: ignore[assignment]
        for i in tl.static_range(TOGETHER):
            t = start + i
            written, forget, eta, theta = gates[i]
            nu = tl.where(col == t, theta, eta * nu)
            decay *= eta
            gamma = forget * gamma + tl.where(written, nu, 0.0)
            carry = forget * carry + tl.where(written, decay, 0.0)
            keep *= forget
            inside = t < C
            tl.store(gamma_ptr + rows_at + t * C, gamma, mask=(col < C) & inside)
            if KEEP:
                tl.store(nus_ptr + rows_at + t * C, nu, mask=(col < C) & inside)
            tl.store(reach_at + t, keep, mask=inside)
            tl.store(reach_at + C + t, carry, mask=inside)
            tl.store(reach_at + 2 * C + t, decay, mask=inside)
    tl.store(nu_ptr + local * C + col, nu, mask=col < C)


@triton.jit(do_not_specialize=COUNTS)
def _decays_backward_kernel(
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
    HAS_MASK: tl.constexpr,
    SHIFT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program computes the gradients of the gates of one chunk of one head, from its last token
    to its first. Gradients arrive from the reads (of gamma [C, C]; of keep and carry, as [2, C]),
    SHIFT rows further down, and from the chunk's end (of the last rows of gamma and nu, as [2, C];
    of the last keep, carry and decay).
    """
    local = tl.program_id(0).to(tl.int64)
    batch = local // chunks // heads
    head = local // chunks % heads
    first = (first_chunk + local % chunks) * C
    count = tl.minimum(tokens - first, C).to(tl.int32)
    col = tl.arange(0, BLOCK_C)
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
    for start in tl.range(0, count, TOGETHER):
        gates = ()
        given = ()
        left = ()
        for i in tl.static_range(TOGETHER):
            t = count - 1 - start - i
            read = t + SHIFT
            there = t >= 0
            by_read = there & (read < count)
            by_col = by_read & (col < count)
            dgamma = tl.load(dgamma_ptr + rows_at + read * C, mask=by_col, other=0.0)
            dkeep = tl.load(dreach + read, mask=by_read, other=0.0)
            dcarry = tl.load(dreach + C + read, mask=by_read, other=0.0)
            written = there
            at = gates_at + t * heads
            if HAS_MASK:
                written = there & (tl.load(written_ptr + at, mask=there, other=0) != 0)
            forget = 1.0 - tl.load(alpha_ptr + at, mask=written, other=0.0)
            eta = tl.load(eta_ptr + at, mask=written, other=1.0)
            # What the token before left; the first finds that nothing was.
            before = t > 0
            gamma = tl.load(gamma_ptr + rows_at + (t - 1) * C, mask=before & (col < C), other=0.0)
            nu = tl.load(nus_ptr + rows_at + (t - 1) * C, mask=before & (col < C), other=0.0)
            keep = tl.load(reach + t - 1, mask=before, other=1.0)
            carry = tl.load(reach + C + t - 1, mask=before, other=0.0)
            decay = tl.load(reach + 2 * C + t - 1, mask=before, other=1.0)
            gates += ((written, forget, eta),)  # type: ignore[assignment]
            given += ((dgamma, dkeep, dcarry),)  # type: ignore[assignment]
            left += ((gamma, nu, keep, carry, decay),)  # type: ignore[assignment]
        for i in tl.static_range(TOGETHER):
            t = count - 1 - start - i
            written, forget, eta = gates[i]
            dgamma, dkeep, dcarry = given[i]
            gamma, nu, keep, carry, decay = left[i]
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
