"""Tiles of the learned optimizers' kernels: the features of some elements, LearnedOptimizer's 28 or
VeLO's 30, and the network of the former.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import pointer

# The line of numbers of a tensor: the factor of its gradients, steps taken before, lr, and
# 1 - lr weight_decay, or VeLO's weight_decay.
FACTOR, TIME, RATE, DECAY = map(tl.constexpr, range(4))
NUMBERS = tl.constexpr(4)
# Decays of three momenta, the square, and three of rows and columns; then 1 minus each.
DECAY_COUNT = tl.constexpr(7)
# The lines of the table of addresses.
AT_P, AT_MOMENTA, AT_SQUARE, AT_ROW, AT_COLUMN, AT_UPDATE, AT_UPSTREAM = map(tl.constexpr, range(7))
# The line of the table of shapes for a tensor [A, X, B, Y, C] in memory: elements, X, Y C, B Y C,
# C, B, whether it is factored, whether its row statistic is over Y, how many numbers rows and
# columns have, where its means of rows begin, elements of a program, and programs.
LENGTH, X, YC, BYC, C, B, FACTORED, ROW_OVER_Y = map(tl.constexpr, range(8))
ROWS, COLUMNS, ROW_MEANS, SPAN, PROGRAMS = map(tl.constexpr, range(8, 13))
SHAPE_FIELDS = tl.constexpr(13)


@triton.jit
def stretch_of(block, tensor, first, shape):
    """The elements that a program takes: from and up to."""
    span = tl.load(shape + SPAN)
    start = (block - tl.load(first + tensor)).to(tl.int64) * span
    return start, tl.minimum(start + span, tl.load(shape + LENGTH))


@triton.jit
def at_least(x, floor):
    """NaN stays."""
    return tl.maximum(x, floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def line_of(shape, at):
    """Of an element: which stretch of B Y C elements it lies in, and where there."""
    byc = tl.maximum(tl.load(shape + BYC), 1)
    return at // byc, (at % byc).to(tl.int32)


@triton.jit
def line_after(shape, line, SIZE: tl.constexpr):
    """The same of the element that follows ``SIZE`` further: without a division of 64 bits."""
    row, inside = line
    narrow = tl.maximum(tl.load(shape + BYC), 1).to(tl.int32)
    inside += SIZE
    more = inside // narrow
    return row + more, inside - more * narrow


@triton.jit
def place_of(fields, line, offsets):
    """Of elements from a line on: their places in the statistics over Y and over X, and in the
    means of rows, ``[A, B, C]``.
    """
    n, yc, byc, c, b, is_plain = fields
    row, inside = line
    inside += offsets
    narrow = byc.to(tl.int32)
    more = (inside >= narrow).to(tl.int32)
    if narrow < offsets.shape[0]:
        more = inside // narrow
    inside -= more * narrow
    if is_plain:
        over_y = row + more
        over_x = inside.to(tl.int64)
        row_mean = tl.zeros_like(over_y)
    else:
        ahead = (row % n).to(tl.int32) + more
        group = row // n + ahead // n.to(tl.int32)
        joined = inside // yc.to(tl.int32)
        innermost = inside % c.to(tl.int32)
        over_y = ((row + more) * b + joined) * c + innermost
        over_x = group * byc + inside
        row_mean = (group * b + joined) * c + innermost
    return over_y, over_x, row_mean


@triton.jit
def fields_of(shape):
    """What ``place_of`` needs of a tensor; the last: it is one matrix whose rows are contiguous."""
    n, yc, byc = tl.load(shape + X), tl.load(shape + YC), tl.load(shape + BYC)
    c, b, length = tl.load(shape + C), tl.load(shape + B), tl.load(shape + LENGTH)
    return n, yc, byc, c, b, (byc == yc) & (c == 1) & (n * byc == length)


@triton.jit
def moved(base, offsets, used, beta, complement, new, MOVE: tl.constexpr):
    """A statistic x; with ``MOVE`` beta x + complement new, which is written back."""
    x = tl.load(base + offsets, mask=used, other=0.0)
    if MOVE:
        x = beta * x + complement * new
        tl.store(base + offsets, x, mask=used)
    return x


@triton.jit
def factors(row, column, means, used):
    """Of one decay: the statistics of elements' rows and columns, and R C."""
    r = tl.load(row, mask=used, other=0.0)
    c = tl.load(column, mask=used, other=0.0)
    mean = tl.load(means, mask=used, other=0.0)
    return r, c, tl.rsqrt(at_least(r / (mean + 1e-9), 1e-9)) * tl.rsqrt(at_least(c, 1e-9))


@triton.jit
def joined(columns, start: tl.constexpr, step: tl.constexpr):
    """Of a power of 2 of columns each ``step``-th from ``start`` on, joined along as many last axes
    of size 2 as it takes: the pairs that are furthest apart are joined first.
    """
    if step == len(columns):
        tile = columns[start]
    else:
        tile = tl.join(joined(columns, start, 2 * step), joined(columns, start + step, 2 * step))
    return tile


@triton.jit
def decayed(g, factor, decay, p):
    """VeLO's gradient: the scaled one with weight decay in it, within 1000 of zero. NaN stays."""
    return tl.clamp(g * factor + decay * p, -1000.0, 1000.0, tl.PropagateNan.ALL)


@triton.jit
def seven(at):
    """Numbers that follow one another."""
    a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return a, b, c, d, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)


@triton.jit
def known_of(tables, tensor, shape, CONFIG: tl.constexpr):
    """What ``feature_tile`` needs of a tensor. The compiler must assume that the stores of a loop
    change what is read: before the loop this takes registers, in it instructions.
    """
    addresses, gradients, numbers, decays, row_means, tensors = tables
    p = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED)
    g = pointer(gradients, tensor, CONFIG.G, CONFIG.ALIGNED)
    m = pointer(addresses, tensor + AT_MOMENTA * tensors, tl.float32, False)
    v = pointer(addresses, tensor + AT_SQUARE * tensors, tl.float32, False)
    row = pointer(addresses, tensor + AT_ROW * tensors, tl.float32, False)
    column = pointer(addresses, tensor + AT_COLUMN * tensors, tl.float32, False)
    line = numbers + tensor * NUMBERS
    factor, decay = tl.load(line + FACTOR), tl.load(line + DECAY)
    is_factored = tl.load(shape + FACTORED) != 0
    over_y_first = tl.load(shape + ROW_OVER_Y) != 0
    means = row_means + tl.load(shape + ROW_MEANS)
    sizes = tl.load(shape + LENGTH), tl.load(shape + ROWS), tl.load(shape + COLUMNS)
    kinds = is_factored, over_y_first
    memory, of_gradients = (p, g, m, v, row, column, means), (factor, decay)
    rates = seven(decays), seven(decays + DECAY_COUNT)
    return memory, of_gradients, rates, sizes, kinds, fields_of(shape)


@triton.jit
def feature_tile(known, elements, line, CONFIG: tl.constexpr, MOVE: tl.constexpr):
    """``[elements, 32]``: the features, not normalised, and zeros; with ``MOVE`` momenta and
    squares see the gradient first, and are written.
    """
    memory, of_gradients, rates, sizes, kinds, fields = known
    p, g, m, v, row, column, means = memory
    factor, decay = of_gradients
    kept_parts, new_parts = rates
    length, rows, columns = sizes
    is_factored, over_y_first = kinds
    at, stop, offsets = elements
    used = offsets < stop - at
    p = tl.load(p + at + offsets, mask=used, other=0)
    g = tl.load(g + at + offsets, mask=used, other=0)
    p, g = p.to(tl.float32), g.to(tl.float32)
    if CONFIG.VELO:
        g = decayed(g, factor, decay, p)
    else:
        g *= factor
    # Of tensors of fewer than two axes: what is added to the mean square that divides m.
    eps: tl.constexpr = 0.0 if CONFIG.VELO else 1e-6
    m, v = m + at, v + at
    m0 = moved(m, offsets, used, kept_parts[0], new_parts[0], g, MOVE)
    m1 = moved(m + length, offsets, used, kept_parts[1], new_parts[1], g, MOVE)
    m2 = moved(m + 2 * length, offsets, used, kept_parts[2], new_parts[2], g, MOVE)
    v = moved(v, offsets, used, kept_parts[3], new_parts[3], g * g, MOVE)
    s = tl.rsqrt(v + 1e-6)
    if is_factored:
        over_y, over_x, row_mean = place_of(fields, line, offsets)
        row_places, column_places = over_x, over_y
        if over_y_first:
            row_places, column_places = over_y, over_x
        row_at, column_at = row + row_places, column + column_places
        mean_at = means + 3 * row_mean
        r0, c0, of_g0 = factors(row_at, column_at, mean_at, used)
        of_m0 = of_g0
        r1, c1, of_g1 = factors(row_at + rows, column_at + columns, mean_at + 1, used)
        of_m1 = of_g1
        r2, c2, of_g2 = factors(row_at + 2 * rows, column_at + 2 * columns, mean_at + 2, used)
        of_m2 = of_g2
    else:
        new = g * g + 1e-30
        kept = row + at
        r0 = moved(kept, offsets, used, kept_parts[4], new_parts[4], new, MOVE)
        c0 = r0
        of_g0 = tl.rsqrt(at_least(r0 + 1e-9, 1e-9))
        of_m0 = tl.rsqrt(r0 + eps)
        r1 = moved(kept + length, offsets, used, kept_parts[5], new_parts[5], new, MOVE)
        c1 = r1
        of_g1 = tl.rsqrt(at_least(r1 + 1e-9, 1e-9))
        of_m1 = tl.rsqrt(r1 + eps)
        r2 = moved(kept + 2 * length, offsets, used, kept_parts[6], new_parts[6], new, MOVE)
        c2 = r2
        of_g2 = tl.rsqrt(at_least(r2 + 1e-9, 1e-9))
        of_m2 = tl.rsqrt(r2 + eps)
    zero = tl.zeros_like(g)
    row_roots = (tl.rsqrt(r0 + 1e-8), tl.rsqrt(r1 + 1e-8), tl.rsqrt(r2 + 1e-8))
    column_roots = (tl.rsqrt(c0 + 1e-8), tl.rsqrt(c1 + 1e-8), tl.rsqrt(c2 + 1e-8))
    scaled_m = (m0 * s, m1 * s, m2 * s, s)
    factored_g = (g * of_g0, g * of_g1, g * of_g2)
    factored_m = (m0 * of_m0, m1 * of_m1, m2 * of_m2)
    # Triton can add tuples, and not unpack them.
    kept = (r0, r1, r2, c0, c1, c2) + row_roots + column_roots + factored_m  # noqa: RUF005
    if CONFIG.VELO:
        clipped = tl.clamp(g, -0.1, 0.1, tl.PropagateNan.ALL)
        whole = (g, clipped, p, m0, m1, m2, v) + scaled_m + factored_g + (g * s,)  # noqa: RUF005
        tile = joined(whole + kept + (zero, zero), 0, 1)
    else:
        plain = (g, p, m0, m1, m2, v) + scaled_m + factored_g  # noqa: RUF005
        tile = joined(plain + kept + (zero, zero, zero, zero), 0, 1)
    return tl.reshape(tile, (offsets.shape[0], 32))
