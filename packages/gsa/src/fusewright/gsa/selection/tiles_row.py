"""A row of scores as the selection's kernel sees it: its statistics, and how many keys a law gives
it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, LOG_2, zeros

# The image of a key that is selected whatever its score, above that of every score. What a row does
# not see has one below all, of the bits of a NaN, -1: these, and the least number where scores may
# be negative.
SINK = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-0x80000000)


@triton.jit
def to_image(x, CONFIG: tl.constexpr):
    """The bits of a score that is not negative, taken for an integer, are in the scores' order; of
    others all bits but the sign are flipped.
    """
    image = x.to(tl.int32, bitcast=True)
    if CONFIG.SIGNED:
        image ^= (image >> 31) & SINK
    return image


@triton.jit
def to_score(image, CONFIG: tl.constexpr):
    if CONFIG.SIGNED:
        image ^= (image >> 31) & SINK
    return image.to(tl.float32, bitcast=True)


@triton.jit
def is_seen(x, CONFIG: tl.constexpr):
    """Which of these scores a row sees: the others are NaN."""
    return x == x if CONFIG.SIGNED else x >= 0.0


@triton.jit
def is_less(a, b):
    """1 where a < b, otherwise 0, for integers that differ by less than 2**31. A sign takes fewer
    instructions than a comparison, and no predicate that has to be kept.
    """
    return ((a - b).to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)


@triton.jit
def reaches(images, bound, CONFIG: tl.constexpr):
    """1 where an image is not below a bound, otherwise 0."""
    if CONFIG.SIGNED:
        reached = (images >= bound.to(tl.int32)).to(tl.int32)
    else:
        reached = is_less(bound - 1, images)
    return reached


@triton.jit
def load_scores(row, start, CONFIG: tl.constexpr):
    """Scores at the places ``start``, ``start + 1``, ... of a row: 0 for NaN, and NaN for what the
    row does not see.

    A row is where it lies; its images (None: they are read); its span, that is how many places it
    has, how many of the first of them it does not see, and the key of the first one; and what it
    always selects: before which place, and from which one on.
    """
    corner, _, span, _ = row
    items, lead, _ = span
    place = start + tl.arange(0, CONFIG.BLOCK)
    # Memory goes on to a multiple of four, so that a thread reads four at once.
    x = tl.load(corner + place, mask=place < tl.cdiv(items, 4) * 4, other=0.0)
    x = tl.where(x == x, x, 0.0)
    unseen = is_less(items - 1, place)
    if CONFIG.RANGED:
        unseen |= is_less(place, lead)
    bits = x.to(tl.int32, bitcast=True) | -unseen
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def raised_always(place, always, CONFIG: tl.constexpr):
    """SINK at the places of sinks and window, 0 elsewhere."""
    sinks, local = always
    raised = is_less(place, sinks)
    if CONFIG.WINDOW:
        raised |= is_less(local - 1, place)
    return -raised & SINK


@triton.jit
def images_of(x, start, always, CONFIG: tl.constexpr):
    """The images of scores, sinks and window raised above all bounds."""
    return with_raised(x, raised_always(start + tl.arange(0, CONFIG.BLOCK), always, CONFIG), CONFIG)


@triton.jit
def with_raised(x, raised, CONFIG: tl.constexpr):
    """The images of scores; SINK where that is ``raised`` and the row sees the key."""
    image = to_image(x, CONFIG)
    if CONFIG.SIGNED:
        image = tl.where((raised > 0) & is_seen(x, CONFIG), SINK, image)
    else:
        image |= raised
    return image


@triton.jit
def load_images(row, start, CONFIG: tl.constexpr):
    """The images of a row from ``start`` on."""
    return images_of(load_scores(row, start, CONFIG), start, row[3], CONFIG)


@triton.jit
def runs_of(x, CONFIG: tl.constexpr):
    """A block, each of its runs a row."""
    RUNS: tl.constexpr = CONFIG.RUNS
    return tl.reshape(x, [RUNS, CONFIG.BLOCK // RUNS])


@triton.jit
def sum_of_runs(x, CONFIG: tl.constexpr):
    """The sum of a block's runs: what a thread has of them becomes four numbers."""
    return tl.sum(runs_of(x, CONFIG), 0)


@triton.jit
def greatest_of_runs(x, CONFIG: tl.constexpr):
    return tl.max(runs_of(x, CONFIG), 0)


@triton.jit
def distances(x, middle, CONFIG: tl.constexpr):
    """Distances of scores to ``middle``; zeros for what the row does not see."""
    return tl.where(is_seen(x, CONFIG), x - middle, 0.0)


@triton.jit
def from_greatest(image, CONFIG: tl.constexpr):
    """Images that count from the greatest number down, below all of which is what is not seen."""
    return tl.where(image == LEAST, LEAST, ~image) if CONFIG.SIGNED else image ^ SINK


@triton.jit
def extremes(most, least, CONFIG: tl.constexpr):
    """The least and the greatest image, of the images in ``most`` and those in ``least``, which
    count from the greatest number down: in one reduction.
    """
    both = tl.max(tl.join(most, least), 0)
    first = tl.arange(0, 2) == 0
    lowest, highest = tl.sum(tl.where(first, 0, both), 0), tl.sum(tl.where(first, both, 0), 0)
    if CONFIG.SIGNED:
        lowest = ~lowest
    else:
        lowest ^= SINK
    return lowest, highest


@triton.jit
def statistics_of(x, visible, CONFIG: tl.constexpr):
    """Mean and population variance of a row's scores, its least and its greatest image."""
    image = to_image(x, CONFIG)
    lowest, highest = extremes(image, from_greatest(image, CONFIG), CONFIG)
    mean = tl.sum(tl.where(is_seen(x, CONFIG), x, 0.0), 0) / tl.maximum(visible, 1)
    distance = distances(x, mean, CONFIG)
    variance = tl.sum(distance * distance, 0) / tl.maximum(visible, 1)
    return mean, variance, lowest, highest


@triton.jit
def streamed_statistics(row, visible, CONFIG: tl.constexpr):
    """The same of a row that is read again, once, but for its first block.

    Distances are those to the mean of the first block. It is no further from the mean of all than
    the deviation times the root of how many blocks there are: few bits cancel.
    """
    items, lead, _ = row[2]
    x = load_scores(row, 0, CONFIG)
    total = tl.sum(tl.where(is_seen(x, CONFIG), x, 0.0), 0)
    start_mean = total / tl.maximum(tl.minimum(items, CONFIG.BLOCK) - lead, 1)
    totals = zeros(CONFIG.BLOCK // CONFIG.RUNS)
    squares = zeros(CONFIG.BLOCK // CONFIG.RUNS)
    most = zeros(CONFIG.BLOCK // CONFIG.RUNS).to(tl.int32) - 1
    if CONFIG.SIGNED:
        most = most + 1 + LEAST
    least = most
    for start in range(0, items, CONFIG.BLOCK):
        x = load_scores(row, start, CONFIG)
        distance = distances(x, start_mean, CONFIG)
        totals += sum_of_runs(distance, CONFIG)
        squares += sum_of_runs(distance * distance, CONFIG)
        image = to_image(x, CONFIG)
        most = tl.maximum(most, greatest_of_runs(image, CONFIG))
        least = tl.maximum(least, greatest_of_runs(from_greatest(image, CONFIG), CONFIG))
    lowest, highest = extremes(most, least, CONFIG)
    further = tl.sum(totals, 0) / tl.maximum(visible, 1)
    variance = tl.sum(squares, 0) / tl.maximum(visible, 1) - further * further
    return start_mean + further, tl.maximum(variance, 0.0), lowest, highest


@triton.jit
def weights_of(x, highest, CONFIG: tl.constexpr):
    """The weights of scores in a softmax, and these times their logarithms."""
    log_weight = x - highest
    seen = is_seen(x, CONFIG)
    weight = tl.where(seen, tl.exp2(log_weight * LOG2_E), 0.0)
    return weight, tl.where(seen, weight * log_weight, 0.0)


@triton.jit
def entropy_of(row, x, visible, highest, CONFIG: tl.constexpr):
    """The entropy of the softmax of a row's n scores, ``visible``, over log(n + 1)."""
    if CONFIG.HELD:
        weights, logs = weights_of(x, highest, CONFIG)
    else:
        weights = zeros(CONFIG.BLOCK // CONFIG.RUNS)
        logs = zeros(CONFIG.BLOCK // CONFIG.RUNS)
        for start in range(0, row[2][0], CONFIG.BLOCK):
            weight, log = weights_of(load_scores(row, start, CONFIG), highest, CONFIG)
            weights += sum_of_runs(weight, CONFIG)
            logs += sum_of_runs(log, CONFIG)
    both = tl.sum(tl.join(weights, logs), 0)
    first = tl.arange(0, 2) == 0
    total, logs = tl.sum(tl.where(first, both, 0.0), 0), tl.sum(tl.where(first, 0.0, both), 0)
    entropy = tl.log2(total) * LOG_2 - logs / total
    most = tl.log2(tl.cast(visible + 1, tl.float32)) * LOG_2
    return tl.where(visible > 0, tl.div_rn(entropy, most), 0.0)


@triton.jit
def wanted_keys(variance, entropy, ema_ptr, k_base, k_min, k_max, CONFIG: tl.constexpr):
    """How many keys the law gives a row, if it sees as many."""
    factor = tl.full([], 1.0, tl.float32)
    if CONFIG.LAW == "entropy":
        factor = 0.5 + entropy
    elif CONFIG.LAW != "fixed":
        ratio = factor
        if ema_ptr is not None:
            ema = tl.load(ema_ptr)
            ratio = tl.div_rn(variance, tl.maximum(ema, 1e-6))
            ratio = tl.where(ema > 0.0, ratio, 1.0)
        factor = ratio
        if CONFIG.LAW == "inverse":
            factor = 0.5 + tl.div_rn(1.0, 1.0 + ratio)
    wanted = tl.floor(k_base * factor)
    return tl.minimum(tl.maximum(wanted, k_min), k_max).to(tl.int32)
