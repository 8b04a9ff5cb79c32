"""A step of a stack's states, and the step back, each in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

BLOCK, WARPS = 2048, 8
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
def _advance_kernel(
    before_ptr,
    state_ptr,
    delta_ptr,
    new_ptr,
    shown_ptr,
    dropped_ptr,
    saturated_ptr,
    count,
    gain,
    one,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK numbers of the next state, also as they are shown to a layer, and the bits that halving
    drops, eight to a byte; tells where one has left the range.
    """
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    kick = whole(gain * tl.load(delta_ptr + place, mask=inside, other=0.0) * one)
    carried = tl.load(before_ptr + place, mask=inside, other=0)
    if HALVES:
        both = carried + tl.load(state_ptr + place, mask=inside, other=0)
        carried = both >> 1
        bits = tl.reshape(both & 1, [BLOCK // 8, 8])
        bytes_ = tl.sum(bits << tl.arange(0, 8)[None, :], 1)
        byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        tl.store(dropped_ptr + byte, bytes_.to(tl.uint8), mask=byte * 8 < count)
    new = tl.minimum(tl.maximum(carried + kick, -LIMIT), LIMIT)
    tl.store(new_ptr + place, new, mask=inside)
    tl.store(shown_ptr + place, new.to(tl.float32) * tl.div_rn(1.0, one), mask=inside)
    outside = (tl.abs(kick) >= LIMIT) | (tl.abs(new) >= LIMIT)
    if tl.max(outside.to(tl.int32), 0) > 0:
        # All that write it write the same.
        tl.store(saturated_ptr, tl.full([], 1, tl.int8))


@triton.jit
def _undo_kernel(
    after_ptr,
    state_ptr,
    delta_ptr,
    dropped_ptr,
    before_ptr,
    shown_ptr,
    count,
    gain,
    one,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK numbers of the state before the one whose step led to ``after``, also as shown."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    kick = whole(gain * tl.load(delta_ptr + place, mask=inside, other=0.0) * one)
    before = tl.load(after_ptr + place, mask=inside, other=0) - kick
    if HALVES:
        byte = tl.load(dropped_ptr + place // 8, mask=inside, other=0).to(tl.int32)
        dropped = (byte >> (place % 8).to(tl.int32)) & 1
        before = (before << 1) + dropped - tl.load(state_ptr + place, mask=inside, other=0)
    tl.store(before_ptr + place, before, mask=inside)
    tl.store(shown_ptr + place, before.to(tl.float32) * tl.div_rn(1.0, one), mask=inside)


def advance(
    before: Tensor, state: Tensor | None, delta: Tensor, gain: float, one: float, saturated: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The next state, as it is shown, and what halving drops where ``state`` is given."""
    new, shown = torch.empty_like(before), torch.empty_like(delta)
    dropped = None
    if state is not None:
        dropped = torch.empty(-(-delta.numel() // 8), dtype=torch.uint8, device=delta.device)
    _advance_kernel[(triton.cdiv(delta.numel(), BLOCK),)](
        *(before, state, delta, new, shown, dropped, saturated.view(torch.int8)),
        *(delta.numel(), gain, one),
        HALVES=state is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return new, shown, dropped


def undo(
    after: Tensor,
    state: Tensor | None,
    delta: Tensor,
    gain: float,
    one: float,
    dropped: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The state before, and as it is shown."""
    before, shown = torch.empty_like(after), torch.empty_like(delta)
    _undo_kernel[(triton.cdiv(delta.numel(), BLOCK),)](
        *(after, state, delta, dropped, before, shown, delta.numel(), gain, one),
        HALVES=state is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return before, shown
