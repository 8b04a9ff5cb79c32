"""What the one program that prepares a step does for every optimizer: read the groups' numbers, and
decide whether the step is taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._norm_kernels import root_of_sum


@triton.jit
def number_of(addresses, wide, group, index: tl.constexpr, COUNT: tl.constexpr, mask):
    """One of ``COUNT`` numbers of parameter groups in fp64, from where its owner keeps it in fp64
    or fp32.
    """
    place = group * COUNT + index
    address = tl.load(addresses + place, mask=mask, other=0)
    is_wide = tl.load(wide + place, mask=mask, other=0) != 0
    in_64 = tl.load(address.to(tl.pointer_type(tl.float64)), mask=mask & is_wide, other=0.0)
    in_32 = tl.load(address.to(tl.pointer_type(tl.float32)), mask=mask & ~is_wide, other=0.0)
    return tl.where(is_wide, in_64, in_32.to(tl.float64))


@triton.jit
def decided(
    partials,
    most,
    grad_scale,
    found_inf,
    norm_out,
    skipped_out,
    skipped_count,
    partial_count,
    HAS_NORM: tl.constexpr,
    CLIPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """What gradients are multiplied by, in fp64, and whether the step is skipped; writes the norm,
    that, and the count of such steps.
    """
    factor = tl.full((), 1.0, tl.float64)
    skips = tl.full((), 0, tl.int1)
    if HAS_SCALE:
        factor = 1.0 / tl.load(grad_scale).to(tl.float64)
    if HAS_FOUND:
        # A scaler adds up what it finds on several devices.
        skips = skips | (tl.load(found_inf) > 0.0)
    if HAS_NORM:
        norm = root_of_sum(partials, partial_count, SIZE) * tl.abs(factor)
        tl.store(norm_out, norm.to(tl.float32))
        # False for NaN too.
        skips = skips | ~(norm < float("inf"))
        if CLIPS:
            # As torch.nn.utils.clip_grad_norm_ has it.
            factor *= tl.minimum(tl.load(most) / (norm + 1e-6), 1.0)
    tl.store(skipped_out, skips)
    tl.store(skipped_count, tl.load(skipped_count) + skips.to(tl.int64))
    return factor, skips
