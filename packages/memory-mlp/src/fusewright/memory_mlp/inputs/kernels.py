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
def joint_rows(source, token, col, within):
    """The projection's rows of ``token`` (64-bit), zeros where there are none. ``source`` is what
    the convolution sees: (projection, history, tokens, the projection's row stride, channels).
    """
    joint_ptr, _, tokens, row_stride, _ = source
    there = (token >= 0) & (token < tokens)
    return tl.load(
        joint_ptr + token[:, None] * row_stride + col[None, :],
        mask=there[:, None] & within[None, :],
        other=0.0,
    )


@triton.jit
def history_rows(source, row, col, within, CONFIG: tl.constexpr):
    """The history's rows ``row`` (64-bit) in fp32, zeros where there are none."""
    _, history_ptr, _, _, channels = source
    there = (row >= 0) & (row < CONFIG.REACH)
    return tl.load(
        history_ptr + row[:, None] * channels + col[None, :],
        mask=there[:, None] & within[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def seen_rows(source, token, col, first, within, RUN: tl.constexpr, CONFIG: tl.constexpr):
    """Of the runs that begin with ``token``, the first of them with ``first``, the REACH rows that
    lie before them and then RUN of their own, in fp32.
    """
    REACH: tl.constexpr = CONFIG.REACH
    rows = tl.tuple(())
    # All are loaded before the first of them is used.
    for step in tl.static_range(REACH + RUN):
        rows += (joint_rows(source, token + (step - REACH), col, within),)
    seen = tl.tuple(())
    for step in tl.static_range(REACH + RUN):
        seen += (rows[step].to(tl.float32),)
    if REACH > 0 and first < REACH:
        # The windows of some runs begin before the first token.
        patched = tl.tuple(())
        for step in tl.static_range(REACH + RUN):
            if step < REACH:
                row = token + step
                earlier = history_rows(source, row, col, within, CONFIG)
                patched += (tl.where((row < REACH)[:, None], earlier, seen[step]),)
            else:
                patched += (seen[step],)
        seen = patched
    return seen


@triton.jit
def taps_of(taps_ptr, col, within, CONFIG: tl.constexpr):
    """The taps of the columns ``col`` in fp32, one after the other; 1 without a convolution."""
    REACH: tl.constexpr = CONFIG.REACH
    taps = tl.tuple(())
    for tap in tl.static_range(REACH + 1):
        if taps_ptr is not None:
            weight = tl.load(taps_ptr + col * (REACH + 1) + tap, mask=within, other=0.0)
            taps += (weight.to(tl.float32)[None, :],)
        else:
            taps += (tl.full([1, col.shape[0]], 1.0, tl.float32),)
    return taps


@triton.jit
def convolved(seen, taps, step: tl.constexpr, CONFIG: tl.constexpr):
    """The convolution at the tokens whose windows begin with ``seen[step]``."""
    REACH: tl.constexpr = CONFIG.REACH
    c = seen[step] * taps[0]
    for tap in tl.static_range(1, REACH + 1):
        c += seen[step + tap] * taps[tap]
    return c


@triton.jit
def activated(c, IS_KEY: tl.constexpr, CONFIG: tl.constexpr):
    """(SiLU(c), of a query or key normalised as KEY_NORM says; what it was multiplied by; the slope
    of SiLU).
    """
    s = tl.sigmoid(c)
    h = c * s
    factor = tl.full([c.shape[0], 1], 1.0, tl.float32)
    if IS_KEY and CONFIG.KEY_NORM != "":
        squares = tl.sum(h * h, 1)
        if CONFIG.KEY_NORM == "rms":
            squares = squares / CONFIG.D
        factor = tl.rsqrt(squares + CONFIG.EPS)[:, None]
        h *= factor
    return h, factor, s * (1.0 + c * (1.0 - s))


@triton.jit
def finite_sums(x):
    """Whether rows are finite, and their sums too."""
    return tl.abs(tl.sum(x.to(tl.float32), 1)) < INFINITY


@triton.jit
def gates_of(logits_ptr, at, heads, there, rate, CONFIG: tl.constexpr):
    """(alpha, eta, the third gate, theta); ``rate`` is theta where it is not LEARNED."""
    alpha = tl.sigmoid(tl.load(logits_ptr + at, mask=there, other=0.0))
    eta = tl.sigmoid(tl.load(logits_ptr + at + heads, mask=there, other=0.0))
    if CONFIG.LEARNED:
        rate_gate = tl.sigmoid(tl.load(logits_ptr + at + 2 * heads, mask=there, other=0.0))
        theta = rate * (1.0 - eta) * rate_gate
    else:
        rate_gate = tl.zeros_like(eta)
        theta = tl.zeros_like(eta) + rate
    return alpha, eta, rate_gate, theta


@triton.jit
def store_last_rows(source, last_ptr, col, within, CONFIG: tl.constexpr):
    """Copy the rows that the next call's convolution sees, in the columns ``col``."""
    _, _, tokens, _, channels = source
    REACH: tl.constexpr = CONFIG.REACH
    slot = tl.arange(0, 8).to(tl.int64)
    row = tokens + slot
    x = joint_rows(source, row - REACH, col, within).to(tl.float32)
    earlier = history_rows(source, row, col, within, CONFIG)
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
    CONFIG: tl.constexpr,
):
    """One program computes the tile's q or, where GROUPS is 3, its k, v and gates and which of its
    tokens are written. That of the last tile copies the rows that the next call's convolution sees.
    ``rate`` is what theta / (1 - eta) stays below, or theta where it is not LEARNED.
    """
    D: tl.constexpr = CONFIG.D
    REACH: tl.constexpr = CONFIG.REACH
    ROWS: tl.constexpr = CONFIG.ROWS
    RUN: tl.constexpr = CONFIG.RUN
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    batch = (tile // tiles).to(tl.int64)
    tile = tile % tiles
    first = tile.to(tl.int64) * (ROWS * RUN)
    token = first + tl.arange(0, ROWS) * RUN
    lane = tl.arange(0, CONFIG.BLOCK_D)
    within = lane < D
    channels = CONFIG.GROUPS * heads * D
    joint_ptr += batch * batch_stride
    history_ptr += batch * (REACH * channels)
    last_ptr += batch * (REACH * channels)
    col = head * D + lane
    source = joint_ptr, history_ptr, tokens, row_stride, channels
    place = (batch * tokens + token) * heads + head

    if tl.program_id(1) == 0:
        seen = seen_rows(source, token, col, first, within, RUN, CONFIG)
        taps = taps_of(taps_ptr, col, within, CONFIG)
        for step in tl.static_range(RUN):
            q, _, _ = activated(convolved(seen, taps, step, CONFIG), True, CONFIG)
            tl.store(
                q_ptr + (place + step * heads)[:, None] * D + lane[None, :],
                q.to(q_ptr.dtype.element_ty),
                mask=(token + step < tokens)[:, None] & within[None, :],
            )
        if REACH > 0 and tile == tiles - 1:
            store_last_rows(source, last_ptr, col, within, CONFIG)
    elif CONFIG.GROUPS == 3:
        key, value = col + heads * D, col + 2 * heads * D
        keys = seen_rows(source, token, key, first, within, RUN, CONFIG)
        values = seen_rows(source, token, value, first, within, RUN, CONFIG)
        index = tl.arange(0, RUN)
        own = token[:, None] + index[None, :]
        there = own < tokens
        number = (batch * tokens + own) * heads + head
        at = (batch * tokens + own) * ((2 + CONFIG.LEARNED) * heads) + head
        alpha, eta, _, theta = gates_of(logits_ptr, at, heads, there, rate, CONFIG)
        written = tl.abs(alpha + eta + theta) < INFINITY
        if present_ptr is not None:
            present = tl.load(present_ptr + batch * tokens + own, mask=there, other=0)
            written = written & (present != 0)
        tl.store(alpha_ptr + number, alpha, mask=there)
        tl.store(eta_ptr + number, eta, mask=there)
        tl.store(theta_ptr + number, theta, mask=there)
        key_taps = taps_of(taps_ptr, key, within, CONFIG)
        value_taps = taps_of(taps_ptr, value, within, CONFIG)
        fine = tl.zeros([ROWS, RUN], tl.int1)
        for step in tl.static_range(RUN):
            to = (place + step * heads)[:, None] * D + lane[None, :]
            inside = (token + step < tokens)[:, None] & within[None, :]
            k, _, _ = activated(convolved(keys, key_taps, step, CONFIG), True, CONFIG)
            v, _, _ = activated(convolved(values, value_taps, step, CONFIG), False, CONFIG)
            k, v = k.to(k_ptr.dtype.element_ty), v.to(v_ptr.dtype.element_ty)
            tl.store(k_ptr + to, k, mask=inside)
            tl.store(v_ptr + to, v, mask=inside)
            both = finite_sums(k) & finite_sums(v)
            fine = tl.where(index[None, :] == step, both[:, None], fine)
        tl.store(written_ptr + number, written & fine, mask=there)
        if REACH > 0 and tile == tiles - 1:
            for group in tl.static_range(1, 3):
                store_last_rows(source, last_ptr, col + group * heads * D, within, CONFIG)
