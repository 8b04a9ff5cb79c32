"""Tiles of matrices whose rows are contiguous: of the 28 features of an element 6 are equal along
its row and 6 along its column, the lines. A program takes a strip of columns, row after row, and
what depends on lines alone comes from tables: ``factors``, ``[lines, 4]``, of which a row's times a
column's are R_i C_i, and the parts of a layer. A matrix has a line for each row, then one for each
column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import pointer
from .tiles import (
    AT_MOMENTA,
    AT_SQUARE,
    DECAY_COUNT,
    FACTOR,
    LENGTH,
    NUMBERS,
    SHAPE_FIELDS,
    joined,
)

# The line of a matrix in the table of strips: its place among the tensors, rows, columns, where its
# lines begin, and the rows of a program.
TENSOR, HEIGHT, WIDTH, LINES, SPAN = map(tl.constexpr, range(5))
STRIP_FIELDS = tl.constexpr(5)
# The features of lines are those from 13 up to 25.
OF_LINES, AFTER_LINES = tl.constexpr(13), tl.constexpr(25)


@triton.jit
def features_of_elements():
    """The places, among the features, of those 16 that are an element's own."""
    k = tl.arange(0, 16)
    return tl.where(k < OF_LINES, k, k + (AFTER_LINES - OF_LINES))


@triton.jit
def strip_of(block, strips, first, owner, SIZE: tl.constexpr):
    """Of a program: its matrix's line in the table, its columns, and its rows from and up to."""
    index = tl.load(owner + block)
    strip = strips + index * STRIP_FIELDS
    local = (block - tl.load(first + index)).to(tl.int32)
    across = ((tl.load(strip + WIDTH) + SIZE - 1) // SIZE).to(tl.int32)
    columns = local % across * SIZE + tl.arange(0, SIZE)
    span = tl.load(strip + SPAN).to(tl.int32)
    start = local // across * span
    return strip, columns, start, tl.minimum(start + span, tl.load(strip + HEIGHT).to(tl.int32))


@triton.jit
def three(at):
    """The first of four numbers of each line."""
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def known_of_strip(tables, strip, columns, CONFIG: tl.constexpr):
    """What ``strip_tile`` needs of a matrix, and of a program's columns."""
    addresses, gradients, numbers, decays, shapes, factors, tensors = tables
    tensor, width = tl.load(strip + TENSOR), tl.load(strip + WIDTH)
    p = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED)
    g = pointer(gradients, tensor, CONFIG.G, CONFIG.ALIGNED)
    m = pointer(addresses, tensor + AT_MOMENTA * tensors, tl.float32, False)
    v = pointer(addresses, tensor + AT_SQUARE * tensors, tl.float32, False)
    factor = tl.load(numbers + tensor * NUMBERS + FACTOR)
    length = tl.load(shapes + tensor * SHAPE_FIELDS + LENGTH)
    of_rows = factors + tl.load(strip + LINES) * 4
    # Beyond the matrix the last column's, which are multiplied by zero.
    line = tl.load(strip + HEIGHT) + tl.minimum(columns, width - 1)
    of_columns = three(of_rows + line * 4)
    kept = tl.load(decays), tl.load(decays + 1), tl.load(decays + 2), tl.load(decays + 3)
    new = decays + DECAY_COUNT
    new = tl.load(new), tl.load(new + 1), tl.load(new + 2), tl.load(new + 3)
    return (p, g, m, v), factor, (kept, new), (width, length), of_rows, of_columns


@triton.jit
def read_strip(known, row, columns):
    """Of one row: gradients, parameters, three momenta and squares, zero beyond the matrix."""
    memory, _, _, sizes, _, _ = known
    p, g, m, v = memory
    width, length = sizes
    used = columns < width
    at = row * width
    m = m + at
    g = tl.load(g + at + columns, mask=used, other=0)
    p = tl.load(p + at + columns, mask=used, other=0)
    m0 = tl.load(m + columns, mask=used, other=0.0)
    m1 = tl.load(m + length + columns, mask=used, other=0.0)
    m2 = tl.load(m + 2 * length + columns, mask=used, other=0.0)
    return g, p, m0, m1, m2, tl.load(v + at + columns, mask=used, other=0.0)


@triton.jit
def strip_tile(known, row, columns, numbers, MOVE: tl.constexpr):
    """``[columns, 16]``: an element's own features in one row, not normalised, zero beyond the
    matrix, from the numbers of ``read_strip``; with ``MOVE`` momenta and squares see the gradient
    first, and are written.
    """
    memory, factor, rates, sizes, of_rows, of_columns = known
    width, length = sizes
    kept, new = rates
    g, p, m0, m1, m2, v = numbers
    g, p = g.to(tl.float32) * factor, p.to(tl.float32)
    used = columns < width
    if MOVE:
        m0 = kept[0] * m0 + new[0] * g
        m1 = kept[1] * m1 + new[1] * g
        m2 = kept[2] * m2 + new[2] * g
        v = kept[3] * v + new[3] * (g * g)
        at = row * width
        out = memory[2] + at
        tl.store(out + columns, m0, mask=used)
        tl.store(out + length + columns, m1, mask=used)
        tl.store(out + 2 * length + columns, m2, mask=used)
        tl.store(memory[3] + at + columns, v, mask=used)
    s = tl.where(used, tl.rsqrt(v + 1e-6), 0.0)
    r0, r1, r2 = three(of_rows + row * 4)
    f0, f1, f2 = r0 * of_columns[0], r1 * of_columns[1], r2 * of_columns[2]
    plain = (g, p, m0, m1, m2, v, m0 * s, m1 * s, m2 * s, s)
    factored = (g * f0, g * f1, g * f2, m0 * f0, m1 * f1, m2 * f2)
    return tl.reshape(joined(plain + factored, 0, 1), (columns.shape[0], 16))
