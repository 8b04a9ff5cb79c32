"""A step of a stack's states, and the step back, each in one pass over them."""

from __future__ import annotations

import triton
import triton.language as tl

LIMIT = tl.constexpr(1 << 30)


@triton.jit
def whole(x):
    """The nearest whole number, of two the even one; NaN is the greatest."""
    x = tl.where(x == x, x, 1.0 * LIMIT)
    x = tl.minimum(tl.maximum(x, -1.0 * LIMIT), 1.0 * LIMIT)
    below = tl.floor(x)
    # Exact, as a difference of neighbours is.
    above_half, half = x - below > 0.5, x - below == 0.5
    number = below.to(tl.int32)
    return number + (above_half | (half & (number % 2 != 0))).to(tl.int32)


@triton.jit
def advance_kernel(
    before_ptr,
    delta_ptr,
    saturated_ptr,
    new_ptr,
    shown_ptr,
    count,
    gain,
    one,
    BLOCK: tl.constexpr,
):
    """BLOCK numbers of the next state, also as they are shown to a layer; sets the flag where one
    has left the range.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    kick = whole(gain * tl.load(delta_ptr + place, mask=inside, other=0.0) * one)
    carried = tl.load(before_ptr + place, mask=inside, other=0)
    new = tl.minimum(tl.maximum(carried + kick, -LIMIT), LIMIT)
    tl.store(new_ptr + place, new, mask=inside)
    tl.store(shown_ptr + place, new.to(tl.float32) * tl.div_rn(1.0, one), mask=inside)
    outside = (tl.abs(kick) >= LIMIT) | (tl.abs(new) >= LIMIT)
    if tl.max(outside.to(tl.int32), 0) > 0:
        # All that write it write the same.
        tl.store(saturated_ptr, tl.full([], 1, tl.int8))


@triton.jit
def undo_kernel(
    after_ptr,
    delta_ptr,
    before_ptr,
    shown_ptr,
    count,
    gain,
    one,
    BLOCK: tl.constexpr,
):
    """BLOCK numbers of the state before the one whose step led to ``after``, also as shown."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    kick = whole(gain * tl.load(delta_ptr + place, mask=inside, other=0.0) * one)
    before = tl.load(after_ptr + place, mask=inside, other=0) - kick
    tl.store(before_ptr + place, before, mask=inside)
    tl.store(shown_ptr + place, before.to(tl.float32) * tl.div_rn(1.0, one), mask=inside)
