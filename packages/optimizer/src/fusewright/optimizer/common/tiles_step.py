"""Device functions of the one program that prepares a step: it reads the groups' numbers and
decides whether the step is taken. All of it is fp64.

    factor = 1 / grad_scale    norm = |factor| sqrt(sum of partials)
    clip = min(1, max_norm / (norm + 1e-6))    skipped = found_inf > 0 or not clip norm < NORM_BELOW
    factor *= clip

A norm is below infinity where it is finite, and below ``step.norm_bound`` where its square is too.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The line of numbers that AdamW's elements need of their tensor, one line a tensor.
FACTOR, RATE1, BETA2, RATE2, STEP_SIZE, ROOT, EPS, DECAY = map(tl.constexpr, range(8))
NUMBERS = tl.constexpr(8)


@triton.jit
def members_of(tables, tensor, tensors):
    """Of the tensors at these places: which of them there are, their groups, the signs of their
    gradients, and where they count steps, as the tables have them.
    """
    groups, signs, steps = tables
    mask = tensor < tensors
    group = tl.load(groups + tensor, mask=mask, other=0)
    sign = tl.load(signs + tensor, mask=mask, other=1.0)
    place = tl.load(steps + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    return mask, group, sign, place


@triton.jit
def number_of(table, group, index: tl.constexpr, COUNT: tl.constexpr, mask):
    """One of ``COUNT`` numbers of parameter groups in fp64, read as fp64 where it is wide, else as
    fp32; the table has addresses, and which are wide.
    """
    addresses, wide = table
    place = group * COUNT + index
    address = tl.load(addresses + place, mask=mask, other=0)
    is_wide = tl.load(wide + place, mask=mask, other=0) != 0
    in_64 = tl.load(address.to(tl.pointer_type(tl.float64)), mask=mask & is_wide, other=0.0)
    in_32 = tl.load(address.to(tl.pointer_type(tl.float32)), mask=mask & ~is_wide, other=0.0)
    return tl.where(is_wide, in_64, in_32.to(tl.float64))


@triton.jit
def decided(partials, partial_count, max_norm, scaler, results, CONFIG: tl.constexpr):
    """What gradients are multiplied by, and whether the step is skipped; writes the norm, whether
    the step is skipped, and the count of skipped steps, which are the results.
    """
    grad_scale, found_inf = scaler
    norm_out, skipped_out, skipped_count = results
    factor = tl.full((), 1.0, tl.float64)
    skips = tl.full((), 0, tl.int1)
    if CONFIG.HAS_SCALE:
        factor = 1.0 / tl.load(grad_scale).to(tl.float64)
    if CONFIG.HAS_FOUND:
        # A scaler adds up the flags of several devices.
        skips = skips | (tl.load(found_inf) > 0.0)
    if CONFIG.HAS_NORM:
        norm = root_of_sum(partials, partial_count, CONFIG.SIZE) * tl.abs(factor)
        tl.store(norm_out, norm.to(tl.float32))
        if CONFIG.CLIPS:
            # As torch.nn.utils.clip_grad_norm_ has it.
            clip = tl.minimum(tl.load(max_norm) / (norm + 1e-6), 1.0)
            factor *= clip
            # inf becomes NaN.
            norm *= clip
        # False for NaN too.
        skips = skips | ~(norm < CONFIG.NORM_BELOW)
    tl.store(skipped_out, skips)
    tl.store(skipped_count, tl.load(skipped_count) + skips.to(tl.int64))
    return factor, skips


@triton.jit
def root_of_sum(partials, partial_count, SIZE: tl.constexpr):
    """sqrt(sum of partials), in a fixed order."""
    lanes = tl.arange(0, SIZE)
    squares = tl.zeros((SIZE,), tl.float64)
    for start in range(0, partial_count, SIZE):
        at = start + lanes
        squares += tl.load(partials + at, mask=at < partial_count, other=0.0)
    return tl.sqrt(tl.sum(squares, 0))
