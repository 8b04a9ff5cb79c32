"""The bracket that holds a row's k-th greatest image.

Each round counts the images from two bounds inside it on, where the k-th would lie if scores lay
evenly, and keeps the part that holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import zeros
from .tiles_row import load_images, reaches, sum_of_runs, to_image, to_score


@triton.jit
def first_bounds(mean, variance, fraction, CONFIG: tl.constexpr):
    """Two images about the one that this fraction of normally distributed numbers exceeds.

    The quantile is that of Abramowitz and Stegun 26.2.22. A wrong one costs rounds alone.
    """
    tail = tl.minimum(fraction, 1.0 - fraction)
    t = tl.sqrt(-1.3862944 * tl.log2(tl.maximum(tail, 1e-12)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + t * (0.99229 + 0.04481 * t))
    z = tl.where(fraction > 0.5, -z, z)
    deviation = tl.sqrt(variance)
    lower, upper = mean + (z - 0.1) * deviation, mean + (z + 0.1) * deviation
    return to_bound(lower, CONFIG), to_bound(upper, CONFIG)


@triton.jit
def to_bound(x, CONFIG: tl.constexpr):
    """The image of a score as a bound: in 64 bits where scores may be negative, since their
    images differ by up to 2**32.
    """
    bound = to_image(x, CONFIG)
    if CONFIG.SIGNED:
        bound = bound.to(tl.int64)
    return bound


@triton.jit
def even_bounds(low, high, reach, above, count, CONFIG: tl.constexpr):
    """Two images about the one that ``count`` images reach if their scores lie evenly between
    those of ``low``, that ``reach`` images reach, and ``high``, that ``above`` do: a deviation to
    either side.
    """
    between = (reach - above).to(tl.float32)
    part = ((reach - count).to(tl.float32) + 0.5) / (between + 1.0)
    deviation = tl.sqrt(part * (1.0 - part) / (between + 2.0))
    least = to_score(low.to(tl.int32), CONFIG)
    width = to_score(high.to(tl.int32), CONFIG) - least
    lower, upper = least + (part - deviation) * width, least + (part + deviation) * width
    return to_bound(lower, CONFIG), to_bound(upper, CONFIG)


@triton.jit
def counts_from(row, lower, upper, CONFIG: tl.constexpr):
    """How many images of a row are not below ``lower``, and how many not below ``upper``."""
    _, images, span, _ = row
    items = span[0]
    if images is not None:
        reached = sum_of_runs(reaches(images, lower, CONFIG), CONFIG)
        passed = sum_of_runs(reaches(images, upper, CONFIG), CONFIG)
        # Both in one sum: a row that is held has at most 2**15.
        both = tl.sum(reached + (passed << 16), 0)
        from_lower, from_upper = both & 0xFFFF, (both >> 16) & 0xFFFF
    else:
        reached = zeros(CONFIG.BLOCK // CONFIG.RUNS).to(tl.int32)
        passed = reached
        for start in range(0, items, CONFIG.BLOCK):
            part = load_images(row, start, CONFIG)
            reached += sum_of_runs(reaches(part, lower, CONFIG), CONFIG)
            passed += sum_of_runs(reaches(part, upper, CONFIG), CONFIG)
        from_lower, from_upper = tl.sum(reached, 0), tl.sum(passed, 0)
    return from_lower, from_upper


@triton.jit
def narrowed(row, bracket, count, limit, CONFIG: tl.constexpr):
    """The bracket from ``low``, that more than ``count`` images reach, to ``high``, that at most
    ``count`` do, made narrower until ``above`` is ``count``, until it is one image wide, or until
    no more than ``limit`` images reach ``low``. ``lower`` and ``upper`` are what is tried first,
    and what is to be tried next.
    """
    low, high, reach, above, lower, upper = bracket
    while (high - low > 1) & (above < count) & (reach > limit):
        lower = tl.minimum(tl.maximum(lower, low + 1), high - 1)
        upper = tl.minimum(tl.maximum(upper, lower), high - 1)
        from_lower, from_upper = counts_from(row, lower, upper, CONFIG)
        before = reach - above
        under, over = from_upper > count, from_lower <= count
        low = tl.where(under, upper, tl.where(over, low, lower))
        reach = tl.where(under, from_upper, tl.where(over, reach, from_lower))
        above = tl.where(under, above, tl.where(over, from_lower, from_upper))
        high = tl.where(under, high, tl.where(over, lower, upper))
        # Scores that lie far from evenly: thirds of the bracket's images until half is gone.
        third = (high - low) // 3
        slow = (reach - above) * 2 > before
        lower, upper = even_bounds(low, high, reach, above, count, CONFIG)
        lower = tl.where(slow, low + third, lower)
        upper = tl.where(slow, high - third, upper)
    return low, high, reach, above, lower, upper


@triton.jit
def end_of_ties(row, image, needed, CONFIG: tl.constexpr):
    """The place before which ``needed``, 1 or more, of those with this image lie."""
    _, images, span, _ = row
    items = span[0]
    first, last = 0 * items, items
    step = tl.arange(0, CONFIG.BLOCK)
    while last - first > 1:
        middle = first + (last - first) // 2
        if images is not None:
            equal = ((images == image) & (step < middle)).to(tl.int32)
        else:
            equal = tl.zeros_like(step)
            for start in range(0, middle, CONFIG.BLOCK):
                part = load_images(row, start, CONFIG)
                equal += ((part == image) & (start + step < middle)).to(tl.int32)
        enough = tl.sum(equal, 0) >= needed
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle)
    return last
