"""Triton kernels of the backward pass between the joint projection and the memory.

The convolution is recomputed. Its gradient by a row needs the gradients of its results at later
tokens, of which a program recomputes those beyond its runs: so one launch writes the
projection's gradient. The taps' gradient is a sum over all tokens: each program stores a
partial sum, and a second launch adds them. No atomics: the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import (
    COUNTS,
    activated,
    convolved,
    gates_of,
    joint_rows,
    seen_rows,
    taps_of,
)


@triton.jit
def zeros(ROWS: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles of zeros."""
    tiles = tl.tuple(())
    for _ in tl.static_range(COUNT):
        tiles += (tl.zeros([ROWS, COLS], tl.float32),)
    return tiles


@triton.jit
def upstream_rows(dy_ptr, token, batch_tokens, head, lane, tokens, heads, D: tl.constexpr):
    """The gradient of a group's results, zeros where there is no token."""
    return tl.load(
        dy_ptr + ((batch_tokens + token) * heads + head)[:, None] * D + lane[None, :],
        mask=(token < tokens)[:, None] & (lane < D)[None, :],
        other=0.0,
    )


@triton.jit
def conv_gradient(c, dy, IS_KEY: tl.constexpr, CONFIG: tl.constexpr):
    """The gradient by the convolution's results ``c``."""
    y, factor, slope = activated(c, IS_KEY, CONFIG)
    if IS_KEY and CONFIG.KEY_NORM != "":
        along = tl.sum(dy * y, 1)
        if CONFIG.KEY_NORM == "rms":
            along = along / CONFIG.D
        dy = (dy - y * along[:, None]) * factor
    return dy * slope


@triton.jit
def group_gradient(
    source,
    taps_ptr,
    dy_ptr,
    dlast_ptr,
    djoint_ptr,
    dhistory_ptr,
    parts_ptr,
    place,
    group,
    lane,
    heads,
    CONFIG: tl.constexpr,
):
    """Write the gradient by the rows of one group that the convolution saw, and this program's
    partial sum of the taps' gradient. ``source`` as in ``joint_rows``, ``place`` is (tile, tokens
    of earlier rows, head).
    """
    _, _, tokens, _, channels = source
    tile, batch_tokens, head = place
    REACH: tl.constexpr = CONFIG.REACH
    ROWS: tl.constexpr = CONFIG.ROWS
    RUN: tl.constexpr = CONFIG.RUN
    IS_KEY: tl.constexpr = group != 2
    within = lane < CONFIG.D
    col = (group * heads + head) * CONFIG.D + lane
    first = tile.to(tl.int64) * (ROWS * RUN)
    start = first + tl.arange(0, ROWS) * RUN
    taps = taps_of(taps_ptr, col, within, CONFIG)
    tap_sums = zeros(ROWS, lane.shape[0], REACH + 1)
    pending = zeros(ROWS, lane.shape[0], REACH)
    if dy_ptr is not None:
        next_x = joint_rows(source, start, col, within)
        next_dy = upstream_rows(dy_ptr, start, batch_tokens, head, lane, tokens, heads, CONFIG.D)
        seen = seen_rows(source, start, col, first, within, 0, CONFIG)
    for step in range(RUN + REACH):
        token = start + step
        dc = tl.zeros([ROWS, lane.shape[0]], tl.float32)
        if dy_ptr is not None:
            window = seen
            window += (next_x.to(tl.float32),)
            dy = next_dy.to(tl.float32)
            # Those of the next token are loaded meanwhile.
            next_x = joint_rows(source, token + 1, col, within)
            next_dy = upstream_rows(
                dy_ptr, token + 1, batch_tokens, head, lane, tokens, heads, CONFIG.D
            )
            dc = conv_gradient(convolved(window, taps, 0, CONFIG), dy, IS_KEY, CONFIG)
            dc = tl.where((token < tokens)[:, None], dc, 0.0)
            # Those beyond the run belong to another program, or to another row.
            own = tl.where(step < RUN, dc, 0.0)
            added = tl.tuple(())
            for tap in tl.static_range(REACH + 1):
                added += (tap_sums[tap] + window[tap] * own,)
            tap_sums = added
            seen = window[1:]
        # Of the windows that begin with the rows from ``token`` on, the first one has now been seen
        # by all.
        dx = dc * taps[0]
        later = tl.tuple(())
        if REACH > 0:
            dx += pending[0]
        for tap in tl.static_range(1, REACH + 1):
            part = dc * taps[tap]
            if tap < REACH:
                part += pending[tap]
            later += (part,)
        pending = later
        if REACH > 0 and dlast_ptr is not None and first + (ROWS * RUN + REACH) > tokens:
            slot = token - tokens
            ending = ((slot >= 0) & (slot < REACH))[:, None] & within[None, :]
            dlast = tl.load(
                dlast_ptr + slot[:, None] * channels + col[None, :], mask=ending, other=0.0
            )
            dx += dlast.to(tl.float32)
        to = token - REACH
        tl.store(
            djoint_ptr + (batch_tokens + to)[:, None] * channels + col[None, :],
            dx.to(djoint_ptr.dtype.element_ty),
            mask=((step >= REACH) & (to < tokens))[:, None] & within[None, :],
        )
        if REACH > 0 and (tile == 0) & (step < REACH):
            tl.store(
                dhistory_ptr + token[:, None] * channels + col[None, :],
                dx.to(dhistory_ptr.dtype.element_ty),
                mask=(start == 0)[:, None] & within[None, :],
            )
    if taps_ptr is not None:
        for tap in tl.static_range(REACH + 1):
            to = parts_ptr + col * (REACH + 1) + tap
            tl.store(to, tl.sum(tap_sums[tap], 0), mask=within)


@triton.jit(do_not_specialize=COUNTS)
def memory_input_backward_kernel(
    joint_ptr,
    history_ptr,
    taps_ptr,
    logits_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dalpha_ptr,
    deta_ptr,
    dtheta_ptr,
    dlast_ptr,
    djoint_ptr,
    dhistory_ptr,
    parts_ptr,
    dlogits_ptr,
    rate,
    tokens,
    heads,
    tiles,
    batch_stride,
    row_stride,
    CONFIG: tl.constexpr,
):
    """One program computes the gradient by the projection, and by the history's rows before the
    first tile, and its partial sum of the taps' gradient, for a tile of one head in one group; the
    last programs compute dlogits. ``parts`` is [tiles of all rows, channels, REACH + 1].
    """
    REACH: tl.constexpr = CONFIG.REACH
    GROUPS: tl.constexpr = CONFIG.GROUPS
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    batch = (tile // tiles).to(tl.int64)
    lane = tl.arange(0, CONFIG.BLOCK_D)
    channels = CONFIG.GROUPS * heads * CONFIG.D
    joint_ptr += batch * batch_stride
    history_ptr += batch * (REACH * channels)
    dhistory_ptr += batch * (REACH * channels)
    if dlast_ptr is not None:
        dlast_ptr += batch * (REACH * channels)
    if taps_ptr is not None:
        parts_ptr += tile.to(tl.int64) * ((REACH + 1) * channels)
    tile = tile % tiles

    source = joint_ptr, history_ptr, tokens, row_stride, channels
    for group in tl.static_range(GROUPS):
        # One group in a program: three would take more registers than there are.
        if tl.program_id(1) == group:
            group_gradient(
                source,
                taps_ptr,
                dq_ptr if group == 0 else dk_ptr if group == 1 else dv_ptr,
                dlast_ptr,
                djoint_ptr,
                dhistory_ptr,
                parts_ptr,
                (tile, batch * tokens, head),
                group,
                lane,
                heads,
                CONFIG,
            )
    if dalpha_ptr is not None and tl.program_id(1) == GROUPS:
        TILE: tl.constexpr = CONFIG.ROWS * CONFIG.RUN
        token = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        there = token < tokens
        place = (batch * tokens + token) * heads + head
        at = (batch * tokens + token) * ((2 + CONFIG.LEARNED) * heads) + head
        alpha, eta, rate_gate, _ = gates_of(logits_ptr, at, heads, there, rate, CONFIG)
        dalpha = tl.load(dalpha_ptr + place, mask=there, other=0.0)
        deta = tl.load(deta_ptr + place, mask=there, other=0.0)
        if CONFIG.LEARNED:
            drate = rate * tl.load(dtheta_ptr + place, mask=there, other=0.0)
            deta -= drate * rate_gate
            drate_gate = drate * (1.0 - eta) * rate_gate * (1.0 - rate_gate)
            tl.store(dlogits_ptr + at + 2 * heads, drate_gate, mask=there)
        tl.store(dlogits_ptr + at, dalpha * alpha * (1.0 - alpha), mask=there)
        tl.store(dlogits_ptr + at + heads, deta * eta * (1.0 - eta), mask=there)


@triton.jit(do_not_specialize=("count",))
def add_parts_kernel(
    parts_ptr,
    out1_ptr,
    out2_ptr,
    count,
    CONFIG: tl.constexpr,
):
    """One program adds the partial sums of NUMBERS numbers, PARTS of them at a time. ``parts`` is
    [count, SIZE1 + SIZE2]: the numbers of one tensor, then those of another.
    """
    PARTS: tl.constexpr = CONFIG.PARTS
    NUMBERS: tl.constexpr = CONFIG.NUMBERS
    SIZE1: tl.constexpr = CONFIG.SIZE1
    SIZE2: tl.constexpr = CONFIG.SIZE2
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = number < SIZE1 + SIZE2
    total = tl.zeros([PARTS, NUMBERS], tl.float32)
    for first in range(0, count, PARTS):
        part = (first + tl.arange(0, PARTS)).to(tl.int64)
        total += tl.load(
            parts_ptr + part[:, None] * (SIZE1 + SIZE2) + number[None, :],
            mask=(part < count)[:, None] & inside[None, :],
            other=0.0,
        )
    x = tl.sum(total, 0)
    tl.store(out1_ptr + number, x.to(out1_ptr.dtype.element_ty), mask=number < SIZE1)
    if SIZE2 > 0:
        out2 = out2_ptr + number - SIZE1
        tl.store(out2, x.to(out2_ptr.dtype.element_ty), mask=inside & (number >= SIZE1))
