"""Triton kernel of the selection: the k greatest of a row of scores, exactly.

Scores are not negative, so their bits, taken for an integer, are in their order: the image of a
score. The k-th greatest image is found by halving a bracket of images, or by histograms of a few
bits at a time; then the indices are written in ascending order, by the prefix sums of what is
chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import LOG2_E, LOG_2

# The image of what cannot be chosen by its score: below that of every score.
NO_SCORE = tl.constexpr(-1)
BINS = tl.constexpr(256)
BIN_BITS = tl.constexpr(8)


@triton.jit
def load_scores(corner, start, visible, BLOCK: tl.constexpr):
    """Scores ``start``, ``start + 1``, ... of a row, 0 for NaN and for what the row does not
    see.
    """
    key = start + tl.arange(0, BLOCK)
    x = tl.load(corner + key, mask=key < visible, other=0.0)
    return tl.where(x == x, x, 0.0)


@triton.jit
def images_of(x, start, visible, sinks, BLOCK: tl.constexpr):
    """The images of scores; NO_SCORE for sinks and for what the row does not see."""
    key = start + tl.arange(0, BLOCK)
    by_score = (key >= sinks) & (key < visible)
    return tl.where(by_score, x.to(tl.int32, bitcast=True), NO_SCORE)


@triton.jit
def load_images(corner, start, visible, sinks, BLOCK: tl.constexpr):
    x = load_scores(corner, start, visible, BLOCK)
    return images_of(x, start, visible, sinks, BLOCK)


@triton.jit
def mean_and_highest(corner, x, visible, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """Mean and maximum of a row's scores."""
    totals, greatest = x, x
    if not HELD:
        for start in range(BLOCK, visible, BLOCK):
            part = load_scores(corner, start, visible, BLOCK)
            totals += part
            greatest = tl.maximum(greatest, part)
    return tl.sum(totals, 0) / tl.maximum(visible, 1), tl.max(greatest, 0)


@triton.jit
def squares_of(x, start, visible, mean, BLOCK: tl.constexpr):
    """Squared distances of scores to the mean; zeros for what the row does not see."""
    distance = tl.where(start + tl.arange(0, BLOCK) < visible, x - mean, 0.0)
    return distance * distance


@triton.jit
def variance_of(corner, x, visible, mean, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """The population variance of a row's scores."""
    squares = squares_of(x, 0, visible, mean, BLOCK)
    if not HELD:
        for start in range(BLOCK, visible, BLOCK):
            part = load_scores(corner, start, visible, BLOCK)
            squares += squares_of(part, start, visible, mean, BLOCK)
    return tl.sum(squares, 0) / tl.maximum(visible, 1)


@triton.jit
def weights_of(x, start, visible, highest, BLOCK: tl.constexpr):
    """The weights of scores in a softmax, and these times their logarithms."""
    log_weight = x - highest
    weight = tl.exp2(log_weight * LOG2_E)
    weight = tl.where(start + tl.arange(0, BLOCK) < visible, weight, 0.0)
    return weight, weight * log_weight


@triton.jit
def entropy_of(corner, x, visible, highest, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """The entropy of the softmax of a row's n scores over log(n + 1)."""
    weights, logs = weights_of(x, 0, visible, highest, BLOCK)
    if not HELD:
        for start in range(BLOCK, visible, BLOCK):
            part = load_scores(corner, start, visible, BLOCK)
            weight, log = weights_of(part, start, visible, highest, BLOCK)
            weights += weight
            logs += log
    total = tl.sum(weights, 0)
    entropy = tl.log2(total) * LOG_2 - tl.sum(logs, 0) / total
    most = tl.log2(tl.cast(visible + 1, tl.float32)) * LOG_2
    return tl.where(visible > 0, tl.div_rn(entropy, most), 0.0)


@triton.jit
def wanted_keys(
    variance, entropy, ema_ptr, k_base, k_min, k_max, LAW: tl.constexpr, HAS_EMA: tl.constexpr
):
    """How many keys the law gives a row, if it sees as many."""
    factor = tl.full([], 1.0, tl.float32)
    if LAW == "entropy":
        factor = 0.5 + entropy
    elif LAW != "fixed":
        ratio = factor
        if HAS_EMA:
            ema = tl.load(ema_ptr)
            ratio = tl.div_rn(variance, tl.maximum(ema, 1e-6))
            ratio = tl.where(ema > 0.0, ratio, 1.0)
        factor = ratio
        if LAW == "inverse":
            factor = 0.5 + tl.div_rn(1.0, 1.0 + ratio)
    wanted = tl.floor(k_base * factor)
    return tl.minimum(tl.maximum(wanted, k_min), k_max).to(tl.int32)


@triton.jit
def count_from(corner, images, bound, visible, sinks, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """How many images are not below ``bound``."""
    if HELD:
        found = (images >= bound).to(tl.int32)
    else:
        found = tl.zeros([BLOCK], tl.int32)
        for start in range(0, visible, BLOCK):
            part = load_images(corner, start, visible, sinks, BLOCK)
            found += (part >= bound).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def histogram_of(images, low, shift, bins):
    """How many images are in each of ``bins`` bins of 2**shift from ``low`` on."""
    place = (images - low) >> shift
    inside = (images >= low) & (place < bins)
    return tl.histogram(tl.where(inside, place, 0), BINS, mask=inside)


@triton.jit
def narrowed(
    corner,
    images,
    low,
    above,
    shift,
    bins,
    count,
    visible,
    sinks,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The start of the bin that holds the image in question, and how many images lie above that
    bin, ``above`` of them above all bins.
    """
    if HELD:
        found = histogram_of(images, low, shift, bins)
    else:
        found = tl.zeros([BINS], tl.int32)
        for start in range(0, visible, BLOCK):
            part = load_images(corner, start, visible, sinks, BLOCK)
            found += histogram_of(part, low, shift, bins)
    place = tl.arange(0, BINS)
    # How many lie in a bin or above it.
    total = above + tl.cumsum(found, 0, reverse=True)
    reached = tl.max(tl.where(total >= count, place, 0), 0)
    above = tl.sum(tl.where(place == reached, total - found, 0), 0)
    return low + (reached << shift), above


@triton.jit
def bound_of(
    corner,
    images,
    highest,
    count,
    visible,
    sinks,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    HALVING: tl.constexpr,
):
    """An image that splits off the ``count`` greatest of more: how many are above it, at most
    ``count``; the others are among those that have it. No image is above ``highest``.
    """
    above = count * 0
    low = above
    if HALVING:
        high = highest + 1
        # More than ``count`` images reach low; ``above``, not more than ``count``, reach high.
        while (high - low > 1) & (above < count):
            middle = low + (high - low) // 2
            reach = count_from(corner, images, middle, visible, sinks, BLOCK, HELD)
            more = reach > count
            low = tl.where(more, middle, low)
            high = tl.where(more, high, middle)
            above = tl.where(more, above, reach)
        low = high - 1
    else:
        # One bit more than the logarithm says, which is rounded.
        bits = tl.minimum(tl.log2(highest.to(tl.float32) + 1.0).to(tl.int32) + 2, 31)
        while bits > 0:
            shift = tl.maximum(bits - BIN_BITS, 0)
            low, above = narrowed(
                *(corner, images, low, above, shift, 1 << (bits - shift), count, visible, sinks),
                *(BLOCK, HELD),
            )
            bits = shift
    return low, above


@triton.jit
def _select_kernel(
    scores_ptr,
    ema_ptr,
    indices_ptr,
    count_ptr,
    variance_ptr,
    entropy_ptr,
    queries,
    keys,
    offset,
    first_row,
    rows,
    last_key,
    k_base,
    k_min,
    k_max,
    sinks,
    CAUSAL: tl.constexpr,
    LAW: tl.constexpr,
    HAS_EMA: tl.constexpr,
    HELD: tl.constexpr,
    HALVING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """One program selects the keys of one row, whose scores, [B, rows, last_key], it holds or, if
    they are too many, reads again for each use.
    """
    place = tl.program_id(0).to(tl.int64)
    row = first_row + tl.program_id(0) % rows
    visible = keys
    if CAUSAL:
        visible = tl.minimum(keys, offset + row + 1)
    corner = scores_ptr + place * last_key
    x = load_scores(corner, 0, visible, BLOCK)

    mean, highest = mean_and_highest(corner, x, visible, BLOCK, HELD)
    variance = variance_of(corner, x, visible, mean, BLOCK, HELD)
    entropy = variance
    at = place // rows * queries + row
    tl.store(variance_ptr + at, variance)
    if LAW == "entropy":
        entropy = entropy_of(corner, x, visible, highest, BLOCK, HELD)
        tl.store(entropy_ptr + at, entropy)
    count = wanted_keys(variance, entropy, ema_ptr, k_base, k_min, k_max, LAW, HAS_EMA)
    count = tl.minimum(count, visible)
    tl.store(count_ptr + at, count)

    # All that a row sees have images above this one, but for sinks, which are chosen anyway.
    by_score = count - tl.minimum(sinks, visible)
    bound, above = 0 * count + NO_SCORE, by_score
    if visible > count:
        bound, above = bound_of(
            *(corner, images_of(x, 0, visible, sinks, BLOCK), highest.to(tl.int32, bitcast=True)),
            *(by_score, visible, sinks, BLOCK, HELD, HALVING),
        )
    needed = by_score - above

    out = indices_ptr + at * k_max
    step = tl.arange(0, BLOCK_OUT)
    # How many have been met above the bound, and at it.
    met_above, met_at = 0 * count, 0 * count
    for start in range(0, visible, BLOCK_OUT):
        key = start + step
        images = load_images(corner, start, visible, sinks, BLOCK_OUT)
        is_above = ((images > bound) | (key < tl.minimum(sinks, visible))).to(tl.int32)
        is_at = ((images == bound) & (images > NO_SCORE)).to(tl.int32)
        # Both sums in one scan.
        both = (is_above << 16) | is_at
        sums = tl.cumsum(both, 0)
        above_before = met_above + (sums >> 16) - is_above
        at_before = met_at + (sums & 0xFFFF) - is_at
        chosen = (is_above > 0) | ((is_at > 0) & (at_before < needed))
        tl.store(out + above_before + tl.minimum(at_before, needed), key, mask=chosen)
        met = tl.sum(both, 0)
        met_above += met >> 16
        met_at += met & 0xFFFF
    for start in range(0, k_max, BLOCK_OUT):
        slot = start + step
        tl.store(
            out + slot, tl.full([BLOCK_OUT], -1, tl.int32), mask=(slot >= count) & (slot < k_max)
        )
