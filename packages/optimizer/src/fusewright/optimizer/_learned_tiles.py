"""Tiles of the learned optimizer's kernels: the 28 features of some elements, and the network."""

from __future__ import annotations

import triton
import triton.language as tl

from ._elements import pointer

# The numbers that hold for all elements of a tensor, one line for each tensor.
FACTOR, TIME, RATE, KEPT = map(tl.constexpr, range(4))
NUMBERS = tl.constexpr(4)
# Decays of three momenta, the square, and three of rows and columns; then 1 minus each.
DECAY_COUNT = tl.constexpr(7)
# Lines of the table of addresses.
AT_P, AT_MOMENTA, AT_SQUARE, AT_ROW, AT_COLUMN, AT_UPDATE, AT_UPSTREAM = map(tl.constexpr, range(7))
# Of a tensor [A, X, B, Y, C] in memory: elements, X, Y C, B Y C, C, B, whether it is factored,
# whether its row statistic is the one over Y, how many numbers rows and columns have, where its
# means of rows are, how many elements a program takes, and how many programs there are.
LENGTH, X, YC, BYC, C, B, FACTORED, ROW_OVER_Y = map(tl.constexpr, range(8))
ROWS, COLUMNS, MIDDLE, SPAN, PROGRAMS = map(tl.constexpr, range(8, 13))
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
    # Large numbers once for all elements, small ones for each.
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
        middle = tl.zeros_like(over_y)
    else:
        ahead = (row % n).to(tl.int32) + more
        group = row // n + ahead // n.to(tl.int32)
        joined = inside // yc.to(tl.int32)
        innermost = inside % c.to(tl.int32)
        over_y = ((row + more) * b + joined) * c + innermost
        over_x = group * byc + inside
        middle = (group * b + joined) * c + innermost
    return over_y, over_x, middle


@triton.jit
def moved(base, offsets, used, beta, rest, new, MOVE: tl.constexpr):
    """A statistic; with ``MOVE`` beta times it and rest times what is new, written back."""
    x = tl.load(base + offsets, mask=used, other=0.0)
    if MOVE:
        x = beta * x + rest * new
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
def feature_tile(
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
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOVE: tl.constexpr,
):
    """``[elements, 32]``: the 28 features, not normalised, and four zeros; with ``MOVE`` momenta
    and squares see the gradient first, and are written.
    """
    used = offsets < stop - at
    length = tl.load(shape + LENGTH)
    p = tl.load(pointer(addresses, tensor, P, ALIGNED) + at + offsets, mask=used, other=0)
    g = tl.load(pointer(gradients, tensor, G, ALIGNED) + at + offsets, mask=used, other=0)
    p = p.to(tl.float32)
    g = g.to(tl.float32) * tl.load(numbers + tensor * NUMBERS + FACTOR)
    m = pointer(addresses, tensor + AT_MOMENTA * tensors, tl.float32, False) + at
    v = pointer(addresses, tensor + AT_SQUARE * tensors, tl.float32, False) + at
    row = pointer(addresses, tensor + AT_ROW * tensors, tl.float32, False)
    rest = decays + DECAY_COUNT
    m0 = moved(m, offsets, used, tl.load(decays + 0), tl.load(rest + 0), g, MOVE)
    m1 = moved(m + length, offsets, used, tl.load(decays + 1), tl.load(rest + 1), g, MOVE)
    m2 = moved(m + 2 * length, offsets, used, tl.load(decays + 2), tl.load(rest + 2), g, MOVE)
    v = moved(v, offsets, used, tl.load(decays + 3), tl.load(rest + 3), g * g, MOVE)
    s = tl.rsqrt(v + 1e-6)
    if tl.load(shape + FACTORED) != 0:
        column = pointer(addresses, tensor + AT_COLUMN * tensors, tl.float32, False)
        over_y, over_x, middle = place_of(shape, at, offsets)
        row_places, column_places = over_x, over_y
        if tl.load(shape + ROW_OVER_Y) != 0:
            row_places, column_places = over_y, over_x
        row_at, column_at = row + row_places, column + column_places
        rows, columns = tl.load(shape + ROWS), tl.load(shape + COLUMNS)
        means = middles + tl.load(shape + MIDDLE) + 3 * middle
        r0, c0, of_g0 = factors(row_at, column_at, means, used)
        of_m0 = of_g0
        r1, c1, of_g1 = factors(row_at + rows, column_at + columns, means + 1, used)
        of_m1 = of_g1
        r2, c2, of_g2 = factors(row_at + 2 * rows, column_at + 2 * columns, means + 2, used)
        of_m2 = of_g2
    else:
        new = g * g + 1e-30
        kept = row + at
        beta0, rest0 = tl.load(decays + 4), tl.load(rest + 4)
        r0 = moved(kept, offsets, used, beta0, rest0, new, MOVE)
        c0 = r0
        of_g0 = tl.rsqrt(at_least(r0 + 1e-9, 1e-9))
        of_m0 = tl.rsqrt(r0 + 1e-6)
        beta1, rest1 = tl.load(decays + 5), tl.load(rest + 5)
        r1 = moved(kept + length, offsets, used, beta1, rest1, new, MOVE)
        c1 = r1
        of_g1 = tl.rsqrt(at_least(r1 + 1e-9, 1e-9))
        of_m1 = tl.rsqrt(r1 + 1e-6)
        beta2, rest2 = tl.load(decays + 6), tl.load(rest + 6)
        r2 = moved(kept + 2 * length, offsets, used, beta2, rest2, new, MOVE)
        c2 = r2
        of_g2 = tl.rsqrt(at_least(r2 + 1e-9, 1e-9))
        of_m2 = tl.rsqrt(r2 + 1e-6)
    zero = tl.zeros_like(g)
    # Joined so that feature k is the k-th: the outermost pairs are 16 apart, the innermost 1.
    f0 = tl.join(g, c0)
    f1 = tl.join(p, c1)
    f2 = tl.join(m0, c2)
    f3 = tl.join(m1, tl.rsqrt(r0 + 1e-8))
    f4 = tl.join(m2, tl.rsqrt(r1 + 1e-8))
    f5 = tl.join(v, tl.rsqrt(r2 + 1e-8))
    f6 = tl.join(m0 * s, tl.rsqrt(c0 + 1e-8))
    f7 = tl.join(m1 * s, tl.rsqrt(c1 + 1e-8))
    f8 = tl.join(m2 * s, tl.rsqrt(c2 + 1e-8))
    f9 = tl.join(s, m0 * of_m0)
    f10 = tl.join(g * of_g0, m1 * of_m1)
    f11 = tl.join(g * of_g1, m2 * of_m2)
    f12 = tl.join(g * of_g2, zero)
    f13 = tl.join(r0, zero)
    f14 = tl.join(r1, zero)
    f15 = tl.join(r2, zero)
    f0 = tl.join(f0, f8)
    f1 = tl.join(f1, f9)
    f2 = tl.join(f2, f10)
    f3 = tl.join(f3, f11)
    f4 = tl.join(f4, f12)
    f5 = tl.join(f5, f13)
    f6 = tl.join(f6, f14)
    f7 = tl.join(f7, f15)
    f0 = tl.join(f0, f4)
    f1 = tl.join(f1, f5)
    f2 = tl.join(f2, f6)
    f3 = tl.join(f3, f7)
    f0 = tl.join(f0, f2)
    f1 = tl.join(f1, f3)
    f0 = tl.join(f0, f1)
    return tl.reshape(f0, (offsets.shape[0], 32))


@triton.jit
def matrix(base, rows, columns, row_stride, column_stride):
    """``[32, 32]`` numbers, zero beyond so many rows and columns."""
    i, j = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    mask = (i < rows) & (j < columns)
    return tl.load(base + i * row_stride + j * column_stride, mask=mask, other=0.0)


@triton.jit
def hidden(x, w, b, PRECISION: tl.constexpr):
    """relu(x w + b)."""
    return at_least(tl.dot(x, w, input_precision=PRECISION) + b[None, :], 0.0)
