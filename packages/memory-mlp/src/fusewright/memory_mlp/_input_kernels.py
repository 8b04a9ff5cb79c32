"""Triton kernels between the joint projection and the memory: causal depthwise convolution, SiLU,
normalisation, gates. A program has some tokens of one head.

The convolution sees the rows of the history and then those of the projection, in one count: token t
is row REACH + t, and its window begins with row t. Those before a program's own tokens are read
again.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One machine code serves all lengths and numbers of heads.
COUNTS = ("tokens", "heads", "tiles")
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def seen_rows(joint_ptr, history_ptr, row, col, inside, row_stride, channels, REACH: tl.constexpr):
    """Rows ``row`` (64-bit) of what the convolution sees of one sequence, in fp32."""
    before = (row < REACH)[:, None]
    x = tl.load(
        joint_ptr + (row - REACH)[:, None] * row_stride + col[None, :],
        mask=inside & (row >= REACH)[:, None],
        other=0.0,
    ).to(tl.float32)
    if REACH > 0:
        earlier = tl.load(
            history_ptr + row[:, None] * channels + col[None, :], mask=inside & before, other=0.0
        )
        x = tl.where(before, earlier.to(tl.float32), x)
    return x


@triton.jit
def convolved(
    joint_ptr,
    history_ptr,
    taps_ptr,
    token,
    col,
    there,
    within,
    row_stride,
    channels,
    HAS_TAPS: tl.constexpr,
    REACH: tl.constexpr,
):
    """The convolution at tokens ``token``, in the columns ``col`` of the projection."""
    inside = there[:, None] & within[None, :]
    if HAS_TAPS:
        out = tl.zeros(inside.shape, tl.float32)
        for tap in tl.static_range(REACH + 1):
            x = seen_rows(
                joint_ptr, history_ptr, token + tap, col, inside, row_stride, channels, REACH
            )
            weight = tl.load(taps_ptr + col * (REACH + 1) + tap, mask=within, other=0.0)
            out += x * weight.to(tl.float32)[None, :]
    else:
        out = seen_rows(joint_ptr, history_ptr, token, col, inside, row_stride, channels, 0)
    return out


@triton.jit
def activated(c, KEY_NORM: tl.constexpr, EPS: tl.constexpr, D: tl.constexpr):
    """(SiLU(c), normalised as KEY_NORM says; what it was multiplied by; the slope of SiLU)."""
    s = tl.sigmoid(c)
    h = c * s
    factor = tl.full([c.shape[0], 1], 1.0, tl.float32)
    if KEY_NORM != "":
        squares = tl.sum(h * h, 1)
        if KEY_NORM == "rms":
            squares = squares / D
        factor = tl.rsqrt(squares + EPS)[:, None]
        h *= factor
    return h, factor, s * (1.0 + c * (1.0 - s))


@triton.jit
def finite_sums(x):
    """Whether rows are finite, and their sums too."""
    return tl.abs(tl.sum(x.to(tl.float32), 1)) < INFINITY


@triton.jit
def gates_of(logits_ptr, at, heads, there, rate, LEARNED: tl.constexpr):
    """(alpha, eta, the third gate, theta); ``rate`` is theta where it is not LEARNED."""
    alpha = tl.sigmoid(tl.load(logits_ptr + at, mask=there, other=0.0))
    eta = tl.sigmoid(tl.load(logits_ptr + at + heads, mask=there, other=0.0))
    if LEARNED:
        share = tl.sigmoid(tl.load(logits_ptr + at + 2 * heads, mask=there, other=0.0))
        theta = rate * (1.0 - eta) * share
    else:
        share = tl.zeros_like(eta)
        theta = tl.zeros_like(eta) + rate
    return alpha, eta, share, theta


@triton.jit(do_not_specialize=COUNTS)
def _memory_input_kernel(
    joint_ptr,
    history_ptr,
    taps_ptr,
    logits_ptr,
    present_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    alpha_ptr,
    eta_ptr,
    theta_ptr,
    written_ptr,
    last_ptr,
    rate,
    tokens,
    heads,
    tiles,
    batch_stride,
    row_stride,
    GROUPS: tl.constexpr,
    LEARNED: tl.constexpr,
    HAS_TAPS: tl.constexpr,
    HAS_PRESENT: tl.constexpr,
    REACH: tl.constexpr,
    KEY_NORM: tl.constexpr,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program computes ROWS tokens of one head: q and, where GROUPS is 3, k, v, the gates and
    which are written. That of the last tokens copies the rows that the next call's convolution
    sees. ``rate`` is what theta / (1 - eta) stays below, or theta where it is not LEARNED.
    """
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    batch = (tile // tiles).to(tl.int64)
    tile = tile % tiles
    token = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_D)
    there, within = token < tokens, lane < D
    inside = there[:, None] & within[None, :]
    channels = GROUPS * heads * D
    joint_ptr += batch * batch_stride
    history_ptr += batch * (REACH * channels)
    col = head * D + lane
    place = (batch * tokens + token) * heads + head
    out = place[:, None] * D + lane[None, :]

    for group in tl.static_range(GROUPS):
        c = convolved(
            joint_ptr,
            history_ptr,
            taps_ptr,
            token,
            col + group * heads * D,
            there,
            within,
            row_stride,
            channels,
            HAS_TAPS,
            REACH,
        )
        x, _, _ = activated(c, "" if group == 2 else KEY_NORM, EPS, D)
        if group == 0:
            tl.store(q_ptr + out, x.to(q_ptr.dtype.element_ty), mask=inside)
        else:
            x = x.to(q_ptr.dtype.element_ty)
            if group == 1:
                tl.store(k_ptr + out, x, mask=inside)
                written = there & finite_sums(x)
            else:
                tl.store(v_ptr + out, x, mask=inside)
                written = written & finite_sums(x)
    if GROUPS == 3:
        at = (batch * tokens + token) * ((2 + LEARNED) * heads) + head
        alpha, eta, _, theta = gates_of(logits_ptr, at, heads, there, rate, LEARNED)
        tl.store(alpha_ptr + place, alpha, mask=there)
        tl.store(eta_ptr + place, eta, mask=there)
        tl.store(theta_ptr + place, theta, mask=there)
        written = written & (tl.abs(alpha + eta + theta) < INFINITY)
        if HAS_PRESENT:
            present = tl.load(present_ptr + batch * tokens + token, mask=there, other=0)
            written = written & (present != 0)
        tl.store(written_ptr + place, written, mask=there)
    if REACH > 0 and tile == tiles - 1:
        slot = tl.arange(0, 8).to(tl.int64)
        kept = (slot < REACH)[:, None] & within[None, :]
        for group in tl.static_range(GROUPS):
            own = col + group * heads * D
            past = seen_rows(
                joint_ptr, history_ptr, tokens + slot, own, kept, row_stride, channels, REACH
            )
            to = last_ptr + (batch * REACH + slot)[:, None] * channels + own[None, :]
            tl.store(to, past.to(last_ptr.dtype.element_ty), mask=kept)
