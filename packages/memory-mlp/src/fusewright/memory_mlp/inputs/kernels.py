"""Triton kernels between the joint projection and the memory: causal depthwise convolution, SiLU,
normalisation, gates.

The convolution sees the rows of the history and then those of the projection, in one count: token t
is row REACH + t, and its window begins with row t. A program has a tile of one head: ROWS runs of
RUN tokens, one after the other. It takes the first tokens of all runs, then the second ones, and so
on, so that a row is read once and stays in registers for as long as a window sees it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# One machine code serves all lengths and numbers of heads.
COUNTS = ("tokens", "heads", "tiles")
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def joint_rows(joint_ptr, token, col, tokens, within, row_stride):
    """The projection's rows of ``token`` (64-bit), zeros where there are none."""
    there = (token >= 0) & (token < tokens)
    return tl.load(
        joint_ptr + token[:, None] * row_stride + col[None, :],
        mask=there[:, None] & within[None, :],
        other=0.0,
    )


@triton.jit
def history_rows(history_ptr, row, col, within, channels, REACH: tl.constexpr):
    """The history's rows ``row`` (64-bit) in fp32, zeros where there are none."""
    there = (row >= 0) & (row < REACH)
    return tl.load(
        history_ptr + row[:, None] * channels + col[None, :],
        mask=there[:, None] & within[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def seen_rows(
    joint_ptr,
    history_ptr,
    token,
    col,
    tokens,
    first,
    within,
    row_stride,
    channels,
    REACH: tl.constexpr,
    RUN: tl.constexpr,
):
    """Of the runs that begin with ``token``, the first of them with ``first``, the REACH rows that
    lie before them and then RUN of their own, in fp32.
    """
    rows = tl.tuple(())
    # All are loaded before the first of them is used.
    for step in tl.static_range(REACH + RUN):
        at = token + (step - REACH)
        rows += (joint_rows(joint_ptr, at, col, tokens, within, row_stride),)
    seen = tl.tuple(())
    for step in tl.static_range(REACH + RUN):
        seen += (rows[step].to(tl.float32),)
    if REACH > 0 and first < REACH:
        # The windows of some runs begin before the first token.
        patched = tl.tuple(())
        for step in tl.static_range(REACH + RUN):
            if step < REACH:
                row = token + step
                earlier = history_rows(history_ptr, row, col, within, channels, REACH)
                patched += (tl.where((row < REACH)[:, None], earlier, seen[step]),)
            else:
                patched += (seen[step],)
        seen = patched
    return seen


@triton.jit
def taps_of(taps_ptr, col, within, HAS_TAPS: tl.constexpr, REACH: tl.constexpr):
    """The taps of the columns ``col`` in fp32, one after the other; 1 without a convolution."""
    taps = tl.tuple(())
    for tap in tl.static_range(REACH + 1):
        if HAS_TAPS:
            weight = tl.load(taps_ptr + col * (REACH + 1) + tap, mask=within, other=0.0)
            taps += (weight.to(tl.float32)[None, :],)
        else:
            taps += (tl.full([1, col.shape[0]], 1.0, tl.float32),)
    return taps


@triton.jit
def convolved(seen, taps, step: tl.constexpr, REACH: tl.constexpr):
    """The convolution at the tokens whose windows begin with ``seen[step]``."""
    c = seen[step] * taps[0]
    for tap in tl.static_range(1, REACH + 1):
        c += seen[step + tap] * taps[tap]
    return c


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
        rate_gate = tl.sigmoid(tl.load(logits_ptr + at + 2 * heads, mask=there, other=0.0))
        theta = rate * (1.0 - eta) * rate_gate
    else:
        rate_gate = tl.zeros_like(eta)
        theta = tl.zeros_like(eta) + rate
    return alpha, eta, rate_gate, theta


@triton.jit
def store_last_rows(
    joint_ptr,
    history_ptr,
    last_ptr,
    col,
    tokens,
    within,
    row_stride,
    channels,
    REACH: tl.constexpr,
):
    """Copy the rows that the next call's convolution sees, in the columns ``col``."""
    slot = tl.arange(0, 8).to(tl.int64)
    row = tokens + slot
    x = joint_rows(joint_ptr, row - REACH, col, tokens, within, row_stride).to(tl.float32)
    earlier = history_rows(history_ptr, row, col, within, channels, REACH)
    x = tl.where((row < REACH)[:, None], earlier, x)
    tl.store(
        last_ptr + slot[:, None] * channels + col[None, :],
        x.to(last_ptr.dtype.element_ty),
        mask=(slot < REACH)[:, None] & within[None, :],
    )


@triton.jit(do_not_specialize=COUNTS)
def memory_input_kernel(
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
    RUN: tl.constexpr,
):
    """One program computes the tile's q or, where GROUPS is 3, its k, v and gates and which of its
    tokens are written. That of the last tile copies the rows that the next call's convolution sees.
    ``rate`` is what theta / (1 - eta) stays below, or theta where it is not LEARNED.
    """
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    batch = (tile // tiles).to(tl.int64)
    tile = tile % tiles
    first = tile.to(tl.int64) * (ROWS * RUN)
    token = first + tl.arange(0, ROWS) * RUN
    lane = tl.arange(0, BLOCK_D)
    within = lane < D
    channels = GROUPS * heads * D
    joint_ptr += batch * batch_stride
    history_ptr += batch * (REACH * channels)
    last_ptr += batch * (REACH * channels)
    col = head * D + lane
    place = (batch * tokens + token) * heads + head

    if tl.program_id(1) == 0:
        seen = seen_rows(
            joint_ptr,
            history_ptr,
            token,
            col,
            tokens,
            first,
            within,
            row_stride,
            channels,
            REACH,
            RUN,
        )
        taps = taps_of(taps_ptr, col, within, HAS_TAPS, REACH)
        for step in tl.static_range(RUN):
            q, _, _ = activated(convolved(seen, taps, step, REACH), KEY_NORM, EPS, D)
            tl.store(
                q_ptr + (place + step * heads)[:, None] * D + lane[None, :],
                q.to(q_ptr.dtype.element_ty),
                mask=(token + step < tokens)[:, None] & within[None, :],
            )
        if REACH > 0 and tile == tiles - 1:
            store_last_rows(
                joint_ptr, history_ptr, last_ptr, col, tokens, within, row_stride, channels, REACH
            )
    elif GROUPS == 3:
        key, value = col + heads * D, col + 2 * heads * D
        keys = seen_rows(
            joint_ptr,
            history_ptr,
            token,
            key,
            tokens,
            first,
            within,
            row_stride,
            channels,
            REACH,
            RUN,
        )
        values = seen_rows(
            joint_ptr,
            history_ptr,
            token,
            value,
            tokens,
            first,
            within,
            row_stride,
            channels,
            REACH,
            RUN,
        )
        index = tl.arange(0, RUN)
        own = token[:, None] + index[None, :]
        there = own < tokens
        number = (batch * tokens + own) * heads + head
        at = (batch * tokens + own) * ((2 + LEARNED) * heads) + head
        alpha, eta, _, theta = gates_of(logits_ptr, at, heads, there, rate, LEARNED)
        written = tl.abs(alpha + eta + theta) < INFINITY
        if HAS_PRESENT:
            present = tl.load(present_ptr + batch * tokens + own, mask=there, other=0)
            written = written & (present != 0)
        tl.store(alpha_ptr + number, alpha, mask=there)
        tl.store(eta_ptr + number, eta, mask=there)
        tl.store(theta_ptr + number, theta, mask=there)
        key_taps = taps_of(taps_ptr, key, within, HAS_TAPS, REACH)
        value_taps = taps_of(taps_ptr, value, within, HAS_TAPS, REACH)
        fine = tl.zeros([ROWS, RUN], tl.int1)
        for step in tl.static_range(RUN):
            to = (place + step * heads)[:, None] * D + lane[None, :]
            inside = (token + step < tokens)[:, None] & within[None, :]
            k, _, _ = activated(convolved(keys, key_taps, step, REACH), KEY_NORM, EPS, D)
            v, _, _ = activated(convolved(values, value_taps, step, REACH), "", EPS, D)
            k, v = k.to(k_ptr.dtype.element_ty), v.to(v_ptr.dtype.element_ty)
            tl.store(k_ptr + to, k, mask=inside)
            tl.store(v_ptr + to, v, mask=inside)
            both = finite_sums(k) & finite_sums(v)
            fine = tl.where(index[None, :] == step, both[:, None], fine)
        tl.store(written_ptr + number, written & fine, mask=there)
        if REACH > 0 and tile == tiles - 1:
            for group in tl.static_range(1, 3):
                store_last_rows(
                    joint_ptr,
                    history_ptr,
                    last_ptr,
                    col + group * heads * D,
                    tokens,
                    within,
                    row_stride,
                    channels,
                    REACH,
                )
