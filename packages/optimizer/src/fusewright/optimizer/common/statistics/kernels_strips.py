"""Kernels of the learned optimizer's statistics of matrices whose rows are contiguous: after rows
and columns, what elements need of their lines; then momenta, v and the sum over each matrix of the
squares of its features. What is equal along a line is squared once a line.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    AT_COLUMN,
    AT_ROW,
    COLUMNS,
    ROW_MEANS,
    ROW_OVER_Y,
    ROWS,
    SHAPE_FIELDS,
    at_least,
)
from .tiles_strips import (
    AFTER_LINES,
    HEIGHT,
    LINES,
    OF_LINES,
    STRIP_FIELDS,
    TENSOR,
    WIDTH,
    features_of_elements,
    known_of_strip,
    read_strip,
    strip_of,
    strip_tile,
)


@triton.jit
def lines_of(block, strips, first, owner, SIZE: tl.constexpr):
    """Of a program that takes up to ``SIZE`` rows, or columns, of a matrix: the matrix's line in
    the table of strips, whether it takes columns, which, how many there are, and their first line.
    """
    index = tl.load(owner + block)
    strip = strips + index // 2 * STRIP_FIELDS
    of_columns = index % 2 == 1
    height, width = tl.load(strip + HEIGHT), tl.load(strip + WIDTH)
    lines = (block - tl.load(first + index)) * SIZE + tl.arange(0, SIZE)
    base = tl.load(strip + LINES) + tl.where(of_columns, height, 0)
    return strip, of_columns, lines, tl.where(of_columns, width, height), base


@triton.jit
def statistics_of(addresses, tensor, shape, of_columns, tensors):
    """The statistics of a matrix's rows in memory, or of its columns, how many there are for each
    decay, and whether they are those that the reference calls rows.
    """
    is_row = (tl.load(shape + ROW_OVER_Y) != 0) != of_columns
    place = tl.where(is_row, AT_ROW, AT_COLUMN)
    count = tl.where(is_row, tl.load(shape + ROWS), tl.load(shape + COLUMNS))
    base = tl.load(addresses + tensor + place * tensors).to(tl.pointer_type(tl.float32))
    return base, count, is_row


@triton.jit
def lines_kernel(
    addresses,
    shapes,
    strips,
    first,
    owner,
    skipped,
    row_means,
    factors,
    partials,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program writes the factors of some lines, and adds the squares of their features over all
    elements of these lines.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    block = tl.program_id(0)
    if ~tl.load(skipped):
        strip, of_columns, lines, count, base = lines_of(block, strips, first, owner, SIZE)
        tensor = tl.load(strip + TENSOR)
        shape = shapes + tensor * SHAPE_FIELDS
        kept, stride, is_row = statistics_of(addresses, tensor, shape, of_columns, tensors)
        # [lines, 4], of which three decays are used.
        which = tl.arange(0, 4)
        mask = (lines < count)[:, None] & (which < 3)[None, :]
        x = tl.load(kept + which[None, :] * stride + lines[:, None], mask=mask, other=0.0)
        mean = tl.load(row_means + tl.load(shape + ROW_MEANS) + which, mask=which < 3, other=0.0)
        factor = tl.where(is_row, x / (mean[None, :] + 1e-9), x)
        where = (base + lines)[:, None] * 4 + which[None, :]
        tl.store(factors + where, tl.rsqrt(at_least(factor, 1e-9)), mask=mask)
        root = tl.rsqrt(x + 1e-8)
        length = tl.where(of_columns, tl.load(strip + HEIGHT), tl.load(strip + WIDTH))
        length = length.to(tl.float32)
        squares = tl.sum(tl.where(mask, x * x, 0.0), 0) * length
        of_roots = tl.sum(tl.where(mask, root * root, 0.0), 0) * length
        k = tl.arange(0, 32)[:, None]
        place = OF_LINES + which + tl.where(is_row, 0, 3)
        use = (which < 3)[None, :]
        total = tl.where(use & (k == place[None, :]), squares[None, :], 0.0)
        total += tl.where(use & (k == place[None, :] + 6), of_roots[None, :], 0.0)
        tl.store(partials + block * 32 + tl.arange(0, 32), tl.sum(total, 1))


@triton.jit
def strip_statistics_kernel(
    addresses,
    gradients,
    shapes,
    strips,
    first,
    owner,
    of_tensors,
    decays,
    skipped,
    factors,
    partials,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program updates the statistics of some rows of a strip of one matrix and adds the squares
    of each feature that is an element's own.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    block = tl.program_id(0)
    if ~tl.load(skipped):
        strip, columns, start, stop = strip_of(block, strips, first, owner, SIZE)
        tables = addresses, gradients, of_tensors, decays, shapes, factors, tensors
        known = known_of_strip(tables, strip, columns, CONFIG)
        squares = tl.zeros((SIZE, 16), tl.float32)
        ahead = read_strip(known, start, columns)
        for row in range(start, stop):
            if CONFIG.AHEAD:
                numbers = ahead
                ahead = read_strip(known, tl.minimum(row + 1, stop - 1), columns)
            else:
                numbers = read_strip(known, row, columns)
            tile = strip_tile(known, row, columns, numbers, True)
            squares += tile * tile
        line, k = partials + block * 32, tl.arange(0, 16)
        tl.store(line + features_of_elements(), tl.sum(squares, 0))
        # Of lines, and of the places without a feature.
        rest = tl.where(k < AFTER_LINES - OF_LINES, k + OF_LINES, k + 16)
        tl.store(line + rest, tl.zeros((16,), tl.float32))
