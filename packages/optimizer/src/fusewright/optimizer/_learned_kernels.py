"""Kernels of the learned optimizer's statistics over many tensors: the numbers of a step, sums of
squares over rows and columns, their means, then momenta and the squares of every feature.

In memory a tensor of two or more axes is ``[A, X, B, Y, C]``: X and Y are its two longest axes in
the order of memory, the others are joined. "Over Y" is the statistic without Y, ``[A, X, B, C]``,
"over X" the one without X, ``[A, B, Y, C]``; which of them is the row is the tensor's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._elements import pointer
from ._learned_tiles import (
    DECAY_COUNT,
    FACTOR,
    KEPT,
    NUMBERS,
    RATE,
    SHAPE_FIELDS,
    TIME,
    feature_tile,
    stretch_of,
)
from ._step_kernels import decided, number_of

# Parameter groups' numbers, of which the kernel gets addresses.
LR, WEIGHT_DECAY = map(tl.constexpr, range(2))
GROUP_NUMBERS = tl.constexpr(2)
# Of a sum of squares over the middle axis of [groups, length, inner].
TENSOR, GROUPS, LENGTH, INNER, CHUNKS, CHUNK, BASE = map(tl.constexpr, range(7))
SUM_FIELDS = tl.constexpr(7)
# Of a line of means: the sum that has it, its address' place, how many there are for each decay,
# length and inner size of what is averaged, and where the averages go; -1: nowhere.
SUM, PLACE, COUNT, LINE_LENGTH, LINE_INNER, MIDDLES = map(tl.constexpr, range(6))
MEAN_FIELDS = tl.constexpr(6)


@triton.jit
def _learned_prepare_kernel(
    partials,
    most,
    grad_scale,
    found_inf,
    group_addresses,
    group_wide,
    groups,
    signs,
    steps,
    momentum_offsets,
    square_offsets,
    factored_offsets,
    decay_rests,
    norm_out,
    skipped_out,
    skipped_count,
    numbers,
    decays,
    partial_count,
    tensors,
    HAS_NORM: tl.constexpr,
    CLIPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The one program decides whether the step is taken, counts it, and writes for each tensor what
    its elements need, and the decays; all in fp64.
    """
    lanes = tl.arange(0, SIZE)
    factor, skips = decided(
        partials,
        most,
        grad_scale,
        found_inf,
        norm_out,
        skipped_out,
        skipped_count,
        partial_count,
        HAS_NORM,
        CLIPS,
        HAS_SCALE,
        HAS_FOUND,
        SIZE,
    )
    which = tl.arange(0, 8)
    learned = which < DECAY_COUNT
    offset = tl.load(momentum_offsets + which, mask=which < 3, other=0.0)
    offset += tl.load(square_offsets + which - 3, mask=which == 3, other=0.0)
    offset += tl.load(factored_offsets + which - 4, mask=(which > 3) & learned, other=0.0)
    rest = tl.load(decay_rests + which, mask=learned, other=0.0)
    rest *= tl.exp(10.0 * offset.to(tl.float64))
    rest = tl.minimum(rest, 1.0)
    tl.store(decays + which, (1.0 - rest).to(tl.float32), mask=learned)
    tl.store(decays + DECAY_COUNT + which, rest.to(tl.float32), mask=learned)
    for start in range(0, tensors, SIZE):
        tensor = start + lanes
        mask = tensor < tensors
        group = tl.load(groups + tensor, mask=mask, other=0)
        sign = tl.load(signs + tensor, mask=mask, other=1.0)
        place = tl.load(steps + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(place, mask=mask, other=0.0)
        tl.store(place, step + 1.0, mask=mask & ~skips)
        lr = number_of(group_addresses, group_wide, group, LR, GROUP_NUMBERS, mask)
        decay = number_of(group_addresses, group_wide, group, WEIGHT_DECAY, GROUP_NUMBERS, mask)
        line = numbers + tensor * NUMBERS
        tl.store(line + FACTOR, (factor * sign).to(tl.float32), mask=mask)
        tl.store(line + TIME, step, mask=mask)
        tl.store(line + RATE, lr.to(tl.float32), mask=mask)
        tl.store(line + KEPT, (1.0 - lr * decay).to(tl.float32), mask=mask)


@triton.jit
def _sums_kernel(
    gradients,
    sums,
    first,
    owner,
    numbers,
    skipped,
    partials,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program adds the squares of a chunk of the middle axis of ``[groups, length, inner]``,
    for some lines where the inner size is 1, else for some places of one group.
    """
    block = tl.program_id(0)
    index = tl.load(owner + block)
    local = block - tl.load(first + index)
    if ~tl.load(skipped):
        line = sums + index * SUM_FIELDS
        tensor, groups = tl.load(line + TENSOR), tl.load(line + GROUPS)
        length, inner = tl.load(line + LENGTH), tl.load(line + INNER)
        chunks = tl.load(line + CHUNKS)
        chunk = local % chunks
        rest = local // chunks
        start = chunk * tl.load(line + CHUNK)
        stop = tl.minimum(start + tl.load(line + CHUNK), length)
        factor = tl.load(numbers + tensor * NUMBERS)
        g = pointer(gradients, tensor, G, ALIGNED)
        out = partials + tl.load(line + BASE)
        if inner == 1:
            add_lines(g, out, rest, groups, length, start, stop, chunk, chunks, factor, LINES, LINE)
        else:
            add_places(g, out, rest, inner, length, start, stop, chunk, chunks, factor, TALL, WIDE)


@triton.jit
def add_lines(
    g,
    out,
    block,
    groups,
    length,
    start,
    stop,
    chunk,
    chunks,
    factor,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
):
    """Squares of some lines of ``[groups, length]``."""
    group = block.to(tl.int64) * LINES + tl.arange(0, LINES)
    squares = tl.zeros((LINES, LINE), tl.float32)
    for at in range(start, stop, LINE):
        place = at + tl.arange(0, LINE)
        mask = (group < groups)[:, None] & (place < stop)[None, :]
        x = tl.load(g + group[:, None] * length + place[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32) * factor
        squares += x * x
    tl.store(out + group * chunks + chunk, tl.sum(squares, 1), mask=group < groups)


@triton.jit
def add_places(
    g,
    out,
    block,
    inner,
    length,
    start,
    stop,
    chunk,
    chunks,
    factor,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Squares at some places of one group of ``[groups, length, inner]``."""
    across = (inner + WIDE - 1) // WIDE
    place = (block % across).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    group = (block // across).to(tl.int64)
    squares = tl.zeros((TALL, WIDE), tl.float32)
    for at in range(start, stop, TALL):
        row = at + tl.arange(0, TALL)
        mask = (row < stop)[:, None] & (place < inner)[None, :]
        where = (group * length + row)[:, None] * inner + place[None, :]
        x = tl.load(g + where, mask=mask, other=0.0).to(tl.float32) * factor
        squares += x * x
    out += (group * chunks + chunk) * inner
    tl.store(out + place, tl.sum(squares, 0), mask=place < inner)


@triton.jit
def _means_kernel(
    addresses,
    sums,
    means,
    first,
    owner,
    decays,
    skipped,
    partials,
    middles,
    span,
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,
):
    """One program moves the row statistics along the second longest axis and writes their mean, or
    moves a stretch of column statistics.
    """
    block = tl.program_id(0)
    index = tl.load(owner + block)
    local = (block - tl.load(first + index)).to(tl.int64)
    if ~tl.load(skipped):
        line = means + index * MEAN_FIELDS
        count, of = tl.load(line + COUNT), tl.load(line + MIDDLES)
        source = sums + tl.load(line + SUM) * SUM_FIELDS
        statistic = tl.load(addresses + tl.load(line + PLACE)).to(tl.pointer_type(tl.float32))
        inner, chunks = tl.load(source + INNER), tl.load(source + CHUNKS)
        shares = partials + tl.load(source + BASE)
        averaged = tl.load(source + LENGTH).to(tl.float32)
        length, stride = tl.load(line + LINE_LENGTH), tl.load(line + LINE_INNER)
        start = (local // stride) * length * stride + local % stride
        if of < 0:
            start = local * span
            stride = tl.full((), 1, tl.int64)
            length = tl.minimum(count - start, span)
        # [lanes, 4], of which three decays are used.
        which = tl.arange(0, 4)
        beta = tl.load(decays + 4 + which, mask=which < 3, other=0.0)
        rest = tl.load(decays + DECAY_COUNT + 4 + which, mask=which < 3, other=0.0)
        total = tl.zeros((SIZE, 4), tl.float32)
        for at in range(0, length, SIZE):
            lanes = at + tl.arange(0, SIZE)
            place = start + lanes * stride
            used = lanes < length
            base = (place // inner) * chunks * inner + place % inner
            squares = tl.zeros((SIZE, SHARES), tl.float32)
            for chunk in range(0, chunks, SHARES):
                share = chunk + tl.arange(0, SHARES)
                mask = used[:, None] & (share < chunks)[None, :]
                where = base[:, None] + share[None, :] * inner
                squares += tl.load(shares + where, mask=mask, other=0.0)
            mean = tl.sum(squares, 1) / averaged + 1e-30
            kept = statistic + which[None, :] * count + place[:, None]
            mask = used[:, None] & (which < 3)[None, :]
            x = tl.load(kept, mask=mask, other=0.0)
            x = beta[None, :] * x + rest[None, :] * mean[:, None]
            tl.store(kept, x, mask=mask)
            total += tl.where(mask, x, 0.0)
        if of >= 0:
            mean_of_line = tl.sum(total, 0) / length.to(tl.float32)
            tl.store(middles + of + local * 3 + which, mean_of_line, mask=which < 3)


@triton.jit
def _statistics_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    skipped,
    middles,
    partials,
    tensors,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program moves the statistics of a stretch of one tensor and adds the squares of each of
    its features.
    """
    block = tl.program_id(0)
    if ~tl.load(skipped):
        tensor = tl.load(owner + block)
        shape = shapes + tensor * SHAPE_FIELDS
        start, stop = stretch_of(block, tensor, first, shape)
        offsets = tl.arange(0, SIZE)
        squares = tl.zeros((SIZE, 32), tl.float32)
        for at in range(start, stop, SIZE):
            tile = feature_tile(
                addresses,
                gradients,
                numbers,
                decays,
                middles,
                tensors,
                tensor,
                shape,
                at,
                stop,
                offsets,
                P,
                G,
                ALIGNED,
                True,
            )
            # What lies behind the end has features too.
            tile = tl.where((offsets < stop - at)[:, None], tile, 0.0)
            squares += tile * tile
        tl.store(partials + block * 32 + tl.arange(0, 32), tl.sum(squares, 0))
