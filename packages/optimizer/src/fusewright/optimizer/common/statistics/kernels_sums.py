"""Kernels of the learned optimizers' statistics of rows and columns over many tensors: sums of
squares, then their means.

In memory a tensor of two or more axes is ``[A, X, B, Y, C]``: X and Y are its two longest axes in
the order of memory, the others are joined. "Over Y" is the statistic without Y, ``[A, X, B, C]``,
"over X" the one without X, ``[A, B, Y, C]``; which of them is the row is the tensor's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import pointer
from .tiles import DECAY, DECAY_COUNT, FACTOR, NUMBERS, decayed

# The line of a sum of squares over the middle axis of [groups, length, inner].
TENSOR, GROUPS, LENGTH, INNER, CHUNKS, CHUNK, BASE = map(tl.constexpr, range(7))
SUM_FIELDS = tl.constexpr(7)
# The line of a statistic of rows or columns: its sum of squares, the place of its address, how many
# numbers it has for each decay, length and inner size of the averaged axis, and where the averages
# are written, -1 for columns, which have none.
SUM, PLACE, COUNT, LINE_LENGTH, LINE_INNER, MEANS = map(tl.constexpr, range(6))
MEAN_FIELDS = tl.constexpr(6)


@triton.jit
def squares_at(source, where, mask, CONFIG: tl.constexpr):
    """The squares of gradients times the factor; with ``VELO`` and ``DECAYS`` weight decay is
    added to them.
    """
    g, p, factor, decay = source
    gradient = tl.load(g + where, mask=mask, other=0.0).to(tl.float32)
    if CONFIG.VELO:
        x = tl.zeros_like(gradient)
        if CONFIG.DECAYS:
            x = tl.load(p + where, mask=mask, other=0.0).to(tl.float32)
        gradient = decayed(gradient, factor, decay, x)
    else:
        gradient *= factor
    return gradient * gradient


@triton.jit
def sums_kernel(
    addresses,
    gradients,
    sums,
    first,
    owner,
    numbers,
    skipped,
    partials,
    CONFIG: tl.constexpr,
):
    """One program adds the squares of a chunk of the middle axis of ``[groups, length, inner]``,
    for some groups where the inner size is 1, else for some places of the inner axis of one group.
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
        across = local // chunks
        start = chunk * tl.load(line + CHUNK)
        stop = tl.minimum(start + tl.load(line + CHUNK), length)
        factor = tl.load(numbers + tensor * NUMBERS + FACTOR)
        decay = tl.load(numbers + tensor * NUMBERS + DECAY)
        g = pointer(gradients, tensor, CONFIG.G, CONFIG.ALIGNED)
        p = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED)
        out = partials + tl.load(line + BASE)
        source, span = (g, p, factor, decay), (start, stop, chunk, chunks)
        if inner == 1:
            add_lines(source, out, across, groups, length, span, CONFIG)
        else:
            add_places(source, out, across, inner, length, span, CONFIG)


@triton.jit
def add_lines(source, out, block, groups, length, span, CONFIG: tl.constexpr):
    """Squares of ``LINES`` groups of ``[groups, length]``."""
    LINES: tl.constexpr = CONFIG.LINES
    LINE: tl.constexpr = CONFIG.LINE
    start, stop, chunk, chunks = span
    group = block.to(tl.int64) * LINES + tl.arange(0, LINES)
    squares = tl.zeros((LINES, LINE), tl.float32)
    for at in range(start, stop, LINE):
        place = at + tl.arange(0, LINE)
        mask = (group < groups)[:, None] & (place < stop)[None, :]
        where = group[:, None] * length + place[None, :]
        squares += squares_at(source, where, mask, CONFIG)
    tl.store(out + group * chunks + chunk, tl.sum(squares, 1), mask=group < groups)


@triton.jit
def add_places(source, out, block, inner, length, span, CONFIG: tl.constexpr):
    """Squares at ``WIDE`` places of the inner axis of one group of ``[groups, length, inner]``."""
    TALL: tl.constexpr = CONFIG.TALL
    WIDE: tl.constexpr = CONFIG.WIDE
    start, stop, chunk, chunks = span
    across = (inner + WIDE - 1) // WIDE
    place = (block % across).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    group = (block // across).to(tl.int64)
    squares = tl.zeros((TALL, WIDE), tl.float32)
    for at in range(start, stop, TALL):
        row = at + tl.arange(0, TALL)
        mask = (row < stop)[:, None] & (place < inner)[None, :]
        where = (group * length + row)[:, None] * inner + place[None, :]
        squares += squares_at(source, where, mask, CONFIG)
    out += (group * chunks + chunk) * inner
    tl.store(out + place, tl.sum(squares, 0), mask=place < inner)


@triton.jit
def means_kernel(
    addresses,
    sums,
    means,
    first,
    owner,
    decays,
    skipped,
    partials,
    row_means,
    span,
    CONFIG: tl.constexpr,
):
    """One program updates the row statistics along the second longest axis with their mean, or
    updates a stretch of column statistics.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    PARTIALS: tl.constexpr = CONFIG.PARTIALS
    block = tl.program_id(0)
    index = tl.load(owner + block)
    local = (block - tl.load(first + index)).to(tl.int64)
    if ~tl.load(skipped):
        line = means + index * MEAN_FIELDS
        count, means_at = tl.load(line + COUNT), tl.load(line + MEANS)
        source = sums + tl.load(line + SUM) * SUM_FIELDS
        statistic = tl.load(addresses + tl.load(line + PLACE)).to(tl.pointer_type(tl.float32))
        inner, chunks = tl.load(source + INNER), tl.load(source + CHUNKS)
        sums_of_chunks = partials + tl.load(source + BASE)
        averaged = tl.load(source + LENGTH).to(tl.float32)
        length, stride = tl.load(line + LINE_LENGTH), tl.load(line + LINE_INNER)
        start = (local // stride) * length * stride + local % stride
        if means_at < 0:
            start = local * span
            stride = tl.full((), 1, tl.int64)
            length = tl.minimum(count - start, span)
        # [lanes, 4], of which three decays are used.
        which = tl.arange(0, 4)
        beta = tl.load(decays + 4 + which, mask=which < 3, other=0.0)
        complement = tl.load(decays + DECAY_COUNT + 4 + which, mask=which < 3, other=0.0)
        total = tl.zeros((SIZE, 4), tl.float32)
        for at in range(0, length, SIZE):
            lanes = at + tl.arange(0, SIZE)
            place = start + lanes * stride
            used = lanes < length
            base = (place // inner) * chunks * inner + place % inner
            squares = tl.zeros((SIZE, PARTIALS), tl.float32)
            for chunk in range(0, chunks, PARTIALS):
                lanes_of_chunks = chunk + tl.arange(0, PARTIALS)
                mask = used[:, None] & (lanes_of_chunks < chunks)[None, :]
                where = base[:, None] + lanes_of_chunks[None, :] * inner
                squares += tl.load(sums_of_chunks + where, mask=mask, other=0.0)
            mean = tl.sum(squares, 1) / averaged + 1e-30
            kept = statistic + which[None, :] * count + place[:, None]
            mask = used[:, None] & (which < 3)[None, :]
            x = tl.load(kept, mask=mask, other=0.0)
            x = beta[None, :] * x + complement[None, :] * mean[:, None]
            tl.store(kept, x, mask=mask)
            total += tl.where(mask, x, 0.0)
        if means_at >= 0:
            mean_of_line = tl.sum(total, 0) / length.to(tl.float32)
            tl.store(row_means + means_at + local * 3 + which, mean_of_line, mask=which < 3)
