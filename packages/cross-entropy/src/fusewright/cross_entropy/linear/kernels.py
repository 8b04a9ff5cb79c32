"""The softmax of a chunk of logits, and their gradient in their place: one launch, which reads
every logit twice, the second time soon after the first, and writes it once. And a gradient times
a number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_kernel(x_ptr, factor_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """One program multiplies BLOCK numbers with the factor in fp32 and rounds them once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    scaled = x * tl.load(factor_ptr)
    tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=("row_stride",))
def softmax_gradient_kernel(
    logits_ptr,
    target_ptr,
    log_p_ptr,
    vocabulary,
    row_stride,
    HAS_GRADIENT: tl.constexpr,
    DEEP: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program takes one row: log p of its target, and p - one_hot(target) over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    known = (target >= 0) & (target < vocabulary)
    x_target = tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32)
    target = tl.where(known, target, -1).to(tl.int32)
    lane = tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    # Every lane has its own maximum and sum, which are reduced once, at the end. A lane takes DEEP
    # numbers at a time, so that its sum is scaled less often.
    largest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, vocabulary, DEEP * LANES):
        col = first + lane
        x = tl.load(logits_ptr + col, mask=col < vocabulary, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        # Before a lane's first finite number there is nothing to subtract.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base[None, :]), 0)
        largest = larger
    top = tl.max(largest, 0)
    # Not added to ``top``: beside a large maximum the logarithm would be rounded away.
    log_sum = tl.log(tl.sum(total * tl.exp(largest - top), 0))
    # A target that is none makes the row NaN.
    log_sum = tl.where(known, log_sum, float("nan"))
    log_p = (x_target - top) - log_sum
    tl.store(log_p_ptr + row, log_p)

    if HAS_GRADIENT:
        # p - 1 of the target from its logarithm: their difference in bf16 would be wrong.
        below = expm1(log_p)
        for first in range(0, vocabulary, DEEP * LANES):
            col = first + lane
            within = col < vocabulary
            x = tl.load(logits_ptr + col, mask=within, other=float("-inf")).to(tl.float32)
            p = tl.exp((x - top) - log_sum)
            g = tl.where(col == target, below, p)
            tl.store(logits_ptr + col, g.to(logits_ptr.dtype.element_ty), mask=within)


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0, where x is small too."""
    # Nothing is lost in the difference below -1/2; above, what eight terms leave out is not.
    series = 1.0 + x / 8
    for n in tl.static_range(7, 1, -1):
        series = 1.0 + x / n * series
    series *= x
    return tl.where(x < -0.5, tl.exp(x) - 1.0, series)
