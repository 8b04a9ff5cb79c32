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
def place_of(shape, at, offsets):
    """Of elements from ``at`` on: their places in the statistics over Y and over X, and in the
    means of rows, ``[A, B, C]``.
    """
    n, byc = tl.load(shape + X), tl.load(shape + BYC)
    # 64-bit numbers once for all elements, 32-bit ones for each.
    row = at // byc
    inside = (at % byc).to(tl.int32) + offsets
    narrow = byc.to(tl.int32)
    more = inside // narrow
    inside -= more * narrow
    yc, c, b = tl.load(shape + YC), tl.load(shape + C), tl.load(shape + B)
    if (byc == yc) & (c == 1) & (n * byc == tl.load(shape + LENGTH)):
        # One matrix whose rows are contiguous.
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
    """Of 32 columns each ``step``-th from ``start`` on, joined along as many last axes of size 2 as
    it takes: the pairs that are furthest apart are joined first.
    """
    if step == 32:
        tile = columns[start]
    else:
        tile = tl.join(joined(columns, start, 2 * step), joined(columns, start + step, 2 * step))
    return tile


@triton.jit
def decayed(g, factor, decay, p):
    """VeLO's gradient: the scaled one with weight decay in it, within 1000 of zero. NaN stays."""
    return tl.clamp(g * factor + decay * p, -1000.0, 1000.0, tl.PropagateNan.ALL)


@triton.jit
def feature_tile(tables, elements, CONFIG: tl.constexpr, MOVE: tl.constexpr):
    """``[elements, 32]``: the features, not normalised, and zeros; with ``MOVE`` momenta and
    squares see the gradient first, and are written.
    """
    addresses, gradients, numbers, decays, row_means, tensors = tables
    tensor, shape, at, stop, offsets = elements
    used = offsets < stop - at
    length = tl.load(shape + LENGTH)
    p = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED) + at + offsets
    p = tl.load(p, mask=used, other=0)
    g = pointer(gradients, tensor, CONFIG.G, CONFIG.ALIGNED) + at + offsets
    g = tl.load(g, mask=used, other=0)
    p = p.to(tl.float32)
    line = numbers + tensor * NUMBERS
    if CONFIG.VELO:
        g = decayed(g.to(tl.float32), tl.load(line + FACTOR), tl.load(line + DECAY), p)
    else:
        g = g.to(tl.float32) * tl.load(line + FACTOR)
    # Of tensors of fewer than two axes: what is added to the mean square that divides m.
    eps: tl.constexpr = 0.0 if CONFIG.VELO else 1e-6
    m = pointer(addresses, tensor + AT_MOMENTA * tensors, tl.float32, False) + at
    v = pointer(addresses, tensor + AT_SQUARE * tensors, tl.float32, False) + at
    row = pointer(addresses, tensor + AT_ROW * tensors, tl.float32, False)
    complements = decays + DECAY_COUNT
    m0 = moved(m, offsets, used, tl.load(decays + 0), tl.load(complements + 0), g, MOVE)
    m1 = moved(m + length, offsets, used, tl.load(decays + 1), tl.load(complements + 1), g, MOVE)
    m2 = moved(
        m + 2 * length, offsets, used, tl.load(decays + 2), tl.load(complements + 2), g, MOVE
    )
    v = moved(v, offsets, used, tl.load(decays + 3), tl.load(complements + 3), g * g, MOVE)
    s = tl.rsqrt(v + 1e-6)
    if tl.load(shape + FACTORED) != 0:
        column = pointer(addresses, tensor + AT_COLUMN * tensors, tl.float32, False)
        over_y, over_x, row_mean = place_of(shape, at, offsets)
        row_places, column_places = over_x, over_y
        if tl.load(shape + ROW_OVER_Y) != 0:
            row_places, column_places = over_y, over_x
        row_at, column_at = row + row_places, column + column_places
        rows, columns = tl.load(shape + ROWS), tl.load(shape + COLUMNS)
        means = row_means + tl.load(shape + ROW_MEANS) + 3 * row_mean
        r0, c0, of_g0 = factors(row_at, column_at, means, used)
        of_m0 = of_g0
        r1, c1, of_g1 = factors(row_at + rows, column_at + columns, means + 1, used)
        of_m1 = of_g1
        r2, c2, of_g2 = factors(row_at + 2 * rows, column_at + 2 * columns, means + 2, used)
        of_m2 = of_g2
    else:
        new = g * g + 1e-30
        kept = row + at
        beta0, complement0 = tl.load(decays + 4), tl.load(complements + 4)
        r0 = moved(kept, offsets, used, beta0, complement0, new, MOVE)
        c0 = r0
        of_g0 = tl.rsqrt(at_least(r0 + 1e-9, 1e-9))
        of_m0 = tl.rsqrt(r0 + eps)
        beta1, complement1 = tl.load(decays + 5), tl.load(complements + 5)
        r1 = moved(kept + length, offsets, used, beta1, complement1, new, MOVE)
        c1 = r1
        of_g1 = tl.rsqrt(at_least(r1 + 1e-9, 1e-9))
        of_m1 = tl.rsqrt(r1 + eps)
        beta2, complement2 = tl.load(decays + 6), tl.load(complements + 6)
        r2 = moved(kept + 2 * length, offsets, used, beta2, complement2, new, MOVE)
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
