"""Triton kernel of the selection: the keys of the k greatest of a row of scores, exactly.

    selected = {s : x_s > x_(k)} and, of {s : x_s = x_(k)}, the lowest s until there are k

with x_(k) the k-th greatest score. Scores are compared as the integers of their bits, their images.
A bracket of images is narrowed until it separates the k greatest, or until those inside are equal;
of these the first are taken. Their keys are written in ascending order, by prefix sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import load_ranges
from .tiles_bracket import end_of_ties, first_bounds, narrowed
from .tiles_row import (
    LEAST,
    SINK,
    entropy_of,
    images_of,
    is_less,
    load_images,
    load_scores,
    raised_always,
    reaches,
    statistics_of,
    streamed_statistics,
    to_image,
    to_score,
    wanted_keys,
    with_raised,
)

# One in each of four fields of 16 bits: a product with it adds to a field those below.
FIELDS = tl.constexpr(0x0001000100010001)


@triton.jit
def sums_before(x, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of the small numbers [RUNS, BLOCK] the sum of those before it, row by row, and
    the sum of all. Four rows share one scan: each has 16 bits of 64.
    """
    ROWS: tl.constexpr = min(RUNS, 4)
    GROUPS: tl.constexpr = RUNS // ROWS
    shift = 16 * (tl.arange(0, RUNS) % ROWS).to(tl.int64)
    wide = tl.reshape(x.to(tl.int64) << shift[:, None], [GROUPS, ROWS, BLOCK])
    packed = tl.sum(wide, 1)
    # Of each group's rows: the sum of one and of those before it.
    sums = tl.sum(packed, 1) * FIELDS
    before = tl.cumsum(packed, 1) - packed + (sums << 16)[:, None]
    before = tl.broadcast_to(before[:, None, :], [GROUPS, ROWS, BLOCK])
    before = (tl.reshape(before, [RUNS, BLOCK]) >> shift[:, None]).to(tl.int32) & 0xFFFF
    total = sums >> 48
    if GROUPS > 1:
        sums = tl.sum(total << (16 * tl.arange(0, GROUPS)), 0) * FIELDS << 16
        group = tl.arange(0, RUNS) // ROWS
        before += ((sums >> (16 * group)).to(tl.int32) & 0xFFFF)[:, None]
    return before, tl.sum(total, 0).to(tl.int32)


@triton.jit
def store_chosen(out, keys_ptr, chosen, start, items, CONFIG: tl.constexpr):
    """Store the keys of those chosen, 1 or 0 for each number from ``start`` on, one behind the
    other, and return how many they are. A key is its number, or what a list of keys holds there.
    """
    RUNS: tl.constexpr = CONFIG.RUNS
    FOURS: tl.constexpr = CONFIG.BLOCK // 4
    # A thread has four neighbours: as bits they are one register, and one sum serves them.
    chosen = tl.reshape(chosen, [RUNS, FOURS // RUNS, 4])
    bits = tl.reshape(tl.sum(chosen << tl.arange(0, 4), 2), [FOURS])
    place, total = sums_before(tl.sum(chosen, 2), RUNS, FOURS // RUNS)
    place = tl.reshape(place, [FOURS])
    at = start + 4 * tl.arange(0, FOURS)
    for _ in range(0, tl.minimum(items, 4)):
        here = (bits & 1) > 0
        key = at
        if keys_ptr is not None:
            key = tl.load(keys_ptr + at, mask=here, other=0)
        tl.store(out + place, key, mask=here)
        place += bits & 1
        bits >>= 1
        at += 1
    return total


@triton.jit
def raised(images, start, low, end, CONFIG: tl.constexpr):
    """Images, those of ``low`` before place ``end`` raised above all bounds."""
    place = start + tl.arange(0, CONFIG.BLOCK)
    return tl.where((images == low.to(tl.int32)) & (place < end), SINK, images)


@triton.jit
def write_held(out, keys_ptr, images, span, bracket, count, CONFIG: tl.constexpr):
    """Narrow the bracket of images that are held, and write the ``count`` greatest's keys."""
    items, _, first_key = span
    row = (out, images, span, None)
    low, high, _, above, _, _ = narrowed(row, bracket, count, 0, CONFIG)
    if above < count:
        end = end_of_ties(row, low.to(tl.int32), count - above, CONFIG)
        images = raised(images, 0, low, end, CONFIG)
    store_chosen(out, keys_ptr, reaches(images, high, CONFIG), first_key, items, CONFIG)


@triton.jit
def write_streamed(out, row, bracket, count, CONFIG: tl.constexpr):
    """Write the keys of the ``count`` greatest of a row that is read again, its bracket narrow."""
    items, _, first_key = row[2]
    low, high, _, above, _, _ = bracket
    end = 0 * count
    if above < count:
        end = end_of_ties(row, low.to(tl.int32), count - above, CONFIG)
    for start in range(0, items, CONFIG.BLOCK):
        images = load_images(row, start, CONFIG)
        chosen = reaches(raised(images, start, low, end, CONFIG), high, CONFIG)
        out += store_chosen(out, None, chosen, first_key + start, items, CONFIG)


@triton.jit
def list_reaching(listed, row, low, CONFIG: tl.constexpr):
    """List the keys of what reaches ``low``, no more than BLOCK, and return their images and how
    many they are.
    """
    corner, _, span, always = row
    items, _, first_key = span
    listed_keys = 0 * items
    for start in range(0, items, CONFIG.BLOCK):
        chosen = reaches(load_images(row, start, CONFIG), low, CONFIG)
        out = listed + listed_keys
        listed_keys += store_chosen(out, None, chosen, first_key + start, items, CONFIG)
    # What other threads have stored is read from here on.
    tl.debug_barrier()
    place = tl.arange(0, CONFIG.BLOCK)
    key = tl.load(listed + place, mask=place < listed_keys, other=0)
    origin = key - first_key
    x = tl.load(corner + origin, mask=place < listed_keys, other=0.0)
    raised = raised_always(origin, always, CONFIG)
    image = with_raised(tl.where(x == x, x, 0.0), raised, CONFIG)
    if CONFIG.SIGNED:
        image = tl.where(place < listed_keys, image, LEAST)
    else:
        image |= -is_less(listed_keys - 1, place)
    return image, listed_keys


@triton.jit
def select_kernel(
    scores_ptr,
    ranges_ptr,
    listed_ptr,
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
    window,
    CONFIG: tl.constexpr,
):
    """One program selects the keys of one row, whose scores, [B, rows, last_key], it holds or, if
    they are too many, reads again for each use until it may hold the candidates, LISTED.
    """
    program = tl.program_id(0).to(tl.int64)
    row = first_row + tl.program_id(0) % rows
    visible = keys
    if CONFIG.CAUSAL:
        visible = tl.minimum(keys, offset + row + 1)
    at = tl.program_id(0) // rows * queries + row
    corner = scores_ptr + program * last_key
    span = (visible, 0, 0)
    if CONFIG.RANGED:
        first, last = load_ranges(ranges_ptr, at.to(tl.int64), True)
        last = tl.minimum(last, visible)
        first = tl.minimum(first, last)
        visible = last - first
        # A thread reads four at once there too. A row that sees nothing has no places.
        first_key = first // 4 * 4
        corner += first_key
        some = visible > 0
        items, lead = tl.where(some, last - first_key, 0), tl.where(some, first - first_key, 0)
        span = (items, lead, first_key)
    items, lead, _ = span
    # The place behind the sinks, and that of the window; ``kept``: how many keys are selected
    # whatever their scores.
    kept = tl.minimum(sinks, visible)
    sinks = lead + kept
    local = items
    if CONFIG.WINDOW:
        local = tl.maximum(items - window, sinks)
        kept += items - local
    always = (sinks, local)
    scores = (corner, None, span, always)
    if CONFIG.HELD:
        x = load_scores(scores, 0, CONFIG)
        mean, variance, low, highest = statistics_of(x, visible, CONFIG)
    else:
        x = corner
        mean, variance, low, highest = streamed_statistics(scores, visible, CONFIG)
    entropy = variance
    if CONFIG.LAW == "entropy":
        entropy = entropy_of(scores, x, visible, to_score(highest, CONFIG), CONFIG)
    if CONFIG.HELD:
        images = to_image(x, CONFIG)
        if kept > 0:
            # A block of its own: 32 masks and 32 scores together do not fit the registers.
            images = images_of(x, 0, always, CONFIG)
    count = wanted_keys(variance, entropy, ema_ptr, k_base, k_min, k_max, CONFIG)
    count = tl.minimum(count, visible)
    tl.store(count_ptr + at, count)
    tl.store(variance_ptr + at, variance)
    if CONFIG.LAW == "entropy":
        tl.store(entropy_ptr + at, entropy)

    # A row that sees no more keys than its law gives it selects all of them.
    more = visible > count
    high, above = tl.where(more, highest + 1, 0), tl.where(more, kept, count)
    if CONFIG.SIGNED:
        # A row that selects all reaches the least of its images.
        high = tl.where(more, high, low).to(tl.int64)
        low = low.to(tl.int64)
    fraction = (count - kept).to(tl.float32) / (visible - kept).to(tl.float32)
    lower, upper = first_bounds(mean, variance, fraction, CONFIG)
    bracket = (low, high, visible, above, lower, upper)
    out = indices_ptr + at.to(tl.int64) * k_max
    if CONFIG.HELD:
        write_held(out, None, images, span, bracket, count, CONFIG)
    else:
        bracket = narrowed(scores, bracket, count, CONFIG.BLOCK if CONFIG.LISTED else 0, CONFIG)
        if CONFIG.LISTED and bracket[2] <= CONFIG.BLOCK:
            listed = listed_ptr + program * CONFIG.BLOCK
            images, candidates = list_reaching(listed, scores, bracket[0], CONFIG)
            write_held(out, listed, images, (candidates, 0, 0), bracket, count, CONFIG)
        else:
            write_streamed(out, scores, bracket, count, CONFIG)
    STEP: tl.constexpr = CONFIG.BLOCK // CONFIG.RUNS
    for start in range(count, k_max, STEP):
        slot = start + tl.arange(0, STEP)
        tl.store(out + slot, tl.full([STEP], -1, tl.int32), mask=slot < k_max)
