"""Triton kernels of the backward pass between the joint projection and the memory.

The convolution is computed again. Its gradient by what it saw needs the gradients of later tokens,
other programs' too: a first launch writes the gradient of its results and every program's share of
the gradient of its taps, a second one gathers. No atomics: the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._input_kernels import COUNTS, activated, convolved, gates_of, seen_rows


@triton.jit
def group_gradient(
    joint_ptr,
    history_ptr,
    taps_ptr,
    dy_ptr,
    dc_ptr,
    parts_ptr,
    token,
    batch_tokens,
    head,
    group,
    lane,
    tokens,
    heads,
    row_stride,
    channels,
    USED: tl.constexpr,
    HAS_TAPS: tl.constexpr,
    REACH: tl.constexpr,
    KEY_NORM: tl.constexpr,
    EPS: tl.constexpr,
    D: tl.constexpr,
):
    """Write the gradient by the convolution's results of one group, and this program's share of the
    taps' one; zeros where the group is not USED.
    """
    there, within = token < tokens, lane < D
    inside = there[:, None] & within[None, :]
    col = (group * heads + head) * D + lane
    dc = tl.zeros(inside.shape, tl.float32)
    if USED:
        c = convolved(
            joint_ptr,
            history_ptr,
            taps_ptr,
            token,
            col,
            there,
            within,
            row_stride,
            channels,
            HAS_TAPS,
            REACH,
        )
        y, factor, slope = activated(c, KEY_NORM, EPS, D)
        place = (batch_tokens + token) * heads + head
        dy = tl.load(dy_ptr + place[:, None] * D + lane[None, :], mask=inside, other=0.0)
        dc = dy.to(tl.float32)
        if KEY_NORM != "":
            along = tl.sum(dc * y, 1)
            if KEY_NORM == "rms":
                along = along / D
            dc = (dc - y * along[:, None]) * factor
        dc *= slope
    to = dc_ptr + (batch_tokens + token)[:, None] * channels + col[None, :]
    tl.store(to, dc.to(dc_ptr.dtype.element_ty), mask=inside)
    if HAS_TAPS:
        for tap in tl.static_range(REACH + 1):
            share = tl.zeros([lane.shape[0]], tl.float32)
            if USED:
                x = seen_rows(
                    joint_ptr, history_ptr, token + tap, col, inside, row_stride, channels, REACH
                )
                share = tl.sum(x * dc, 0)
            tl.store(parts_ptr + tap * channels + col, share, mask=within)


@triton.jit(do_not_specialize=COUNTS)
def _memory_input_backward_kernel(
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
    dc_ptr,
    parts_ptr,
    dlogits_ptr,
    rate,
    tokens,
    heads,
    tiles,
    batch_stride,
    row_stride,
    GROUPS: tl.constexpr,
    LEARNED: tl.constexpr,
    HAS_TAPS: tl.constexpr,
    HAS_DQ: tl.constexpr,
    HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr,
    HAS_DGATES: tl.constexpr,
    REACH: tl.constexpr,
    KEY_NORM: tl.constexpr,
    EPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program computes, for ROWS tokens of one head in one group, the gradient by the
    convolution's results and its share of the taps' gradient; those of queries dlogits too.
    ``parts`` is [tiles of all rows, REACH + 1, channels]; without taps dc is the projection's
    gradient.
    """
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    batch = (tile // tiles).to(tl.int64)
    token = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_D)
    channels = GROUPS * heads * D
    joint_ptr += batch * batch_stride
    history_ptr += batch * (REACH * channels)
    if HAS_TAPS:
        parts_ptr += tile.to(tl.int64) * ((REACH + 1) * channels)

    for group in tl.static_range(GROUPS):
        # One of them: together they would take more registers than there are.
        if tl.program_id(1) == group:
            group_gradient(
                joint_ptr,
                history_ptr,
                taps_ptr,
                dq_ptr if group == 0 else dk_ptr if group == 1 else dv_ptr,
                dc_ptr,
                parts_ptr,
                token,
                batch * tokens,
                head,
                group,
                lane,
                tokens,
                heads,
                row_stride,
                channels,
                HAS_DQ if group == 0 else HAS_DK if group == 1 else HAS_DV,
                HAS_TAPS,
                REACH,
                "" if group == 2 else KEY_NORM,
                EPS,
                D,
            )
    if HAS_DGATES and tl.program_id(1) == 0:
        there = token < tokens
        place = (batch * tokens + token) * heads + head
        at = (batch * tokens + token) * ((2 + LEARNED) * heads) + head
        alpha, eta, share, _ = gates_of(logits_ptr, at, heads, there, rate, LEARNED)
        dalpha = tl.load(dalpha_ptr + place, mask=there, other=0.0)
        deta = tl.load(deta_ptr + place, mask=there, other=0.0)
        if LEARNED:
            drate = rate * tl.load(dtheta_ptr + place, mask=there, other=0.0)
            deta -= drate * share
            dshare = drate * (1.0 - eta) * share * (1.0 - share)
            tl.store(dlogits_ptr + at + 2 * heads, dshare, mask=there)
        tl.store(dlogits_ptr + at, dalpha * alpha * (1.0 - alpha), mask=there)
        tl.store(dlogits_ptr + at + heads, deta * eta * (1.0 - eta), mask=there)


@triton.jit(do_not_specialize=("tokens", "tiles", "shares"))
def _joint_gradient_kernel(
    dc_ptr,
    taps_ptr,
    parts_ptr,
    dlast_ptr,
    djoint_ptr,
    dhistory_ptr,
    dtaps_ptr,
    tokens,
    tiles,
    shares,
    HAS_DLAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    REACH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_COLS: tl.constexpr,
):
    """One program adds the shares of PART_COLS numbers of dtaps, or computes the gradient by ROWS
    rows of what the convolution saw, in COLS channels: rows of the history or of the projection.
    """
    TAPS: tl.constexpr = REACH + 1
    NUMBERS: tl.constexpr = TAPS * CHANNELS
    SUMS: tl.constexpr = (NUMBERS + PART_COLS - 1) // PART_COLS
    WIDE: tl.constexpr = (CHANNELS + COLS - 1) // COLS
    program = tl.program_id(0)
    if program < SUMS:
        number = program * PART_COLS + tl.arange(0, PART_COLS)
        total = tl.zeros([PARTS, PART_COLS], tl.float32)
        for first in range(0, shares, PARTS):
            part = (first + tl.arange(0, PARTS)).to(tl.int64)
            total += tl.load(
                parts_ptr + part[:, None] * NUMBERS + number[None, :],
                mask=(part < shares)[:, None] & (number < NUMBERS)[None, :],
                other=0.0,
            )
        at = dtaps_ptr + number % CHANNELS * TAPS + number // CHANNELS
        tl.store(at, tl.sum(total, 0).to(dtaps_ptr.dtype.element_ty), mask=number < NUMBERS)
    else:
        tile = (program - SUMS) // WIDE
        batch = (tile // tiles).to(tl.int64)
        row = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = (program - SUMS) % WIDE * COLS + tl.arange(0, COLS)
        inside = (row < tokens + REACH)[:, None] & (col < CHANNELS)[None, :]
        dx = tl.zeros([ROWS, COLS], tl.float32)
        for tap in tl.static_range(TAPS):
            token = row - tap
            windows = (token >= 0) & (token < tokens)
            dc = tl.load(
                dc_ptr + (batch * tokens + token)[:, None] * CHANNELS + col[None, :],
                mask=inside & windows[:, None],
                other=0.0,
            )
            weight = tl.load(taps_ptr + col * TAPS + tap, mask=col < CHANNELS, other=0.0)
            dx += dc * weight.to(tl.float32)[None, :]
        if HAS_DLAST:
            slot = row - tokens
            dlast = tl.load(
                dlast_ptr + (batch * REACH + slot)[:, None] * CHANNELS + col[None, :],
                mask=inside & (slot >= 0)[:, None],
                other=0.0,
            )
            dx += dlast.to(tl.float32)
        token = row - REACH
        tl.store(
            djoint_ptr + (batch * tokens + token)[:, None] * CHANNELS + col[None, :],
            dx.to(djoint_ptr.dtype.element_ty),
            mask=inside & (token >= 0)[:, None],
        )
        if REACH > 0:
            tl.store(
                dhistory_ptr + (batch * REACH + row)[:, None] * CHANNELS + col[None, :],
                dx.to(dhistory_ptr.dtype.element_ty),
                mask=inside & (token < 0)[:, None],
            )
