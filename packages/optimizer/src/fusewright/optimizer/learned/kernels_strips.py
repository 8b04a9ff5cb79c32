"""Kernels of the learned optimizer's network over matrices whose rows are contiguous.

    f W1 + b1 = f_element W1_element + (f_row W1_row + b1) + f_column W1_column

The last two terms are computed once a line, and are what the first layer's product starts with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.statistics.kernels_strips import lines_of, statistics_of
from ..common.statistics.tiles import SHAPE_FIELDS
from ..common.statistics.tiles_strips import (
    HEIGHT,
    LINES,
    OF_LINES,
    TENSOR,
    WIDTH,
    features_of_elements,
    known_of_strip,
    read_strip,
    strip_of,
    strip_tile,
)
from .kernels import layers_after, move, rates_of
from .tiles import after_start


@triton.jit
def layers_kernel(
    addresses,
    shapes,
    strips,
    first,
    owner,
    norms,
    scales,
    w1,
    biases,
    skipped,
    layers,
    width,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program writes some lines' part of the first layer, times the powers of 2; the bias is
    in those of rows.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    block = tl.program_id(0)
    if ~tl.load(skipped):
        strip, of_columns, lines, count, base = lines_of(block, strips, first, owner, SIZE)
        tensor = tl.load(strip + TENSOR)
        shape = shapes + tensor * SHAPE_FIELDS
        kept, stride, is_row = statistics_of(addresses, tensor, shape, of_columns, tensors)
        h = tl.arange(0, 32)
        scale = tl.load(scales + tensor * 32 + h)
        bias = tl.where(of_columns, 0.0, tl.load(biases + tensor * 32 + h) * scale)
        total = tl.zeros((SIZE, 32), tl.float32) + bias[None, :]
        mask = lines < count
        for which in tl.static_range(3):
            x = tl.load(kept + which * stride + lines, mask=mask, other=0.0)
            place = OF_LINES + which + tl.where(is_row, 0, 3)
            w = tl.load(w1 + h * width + place) * scale
            total += (x * tl.load(norms + tensor * 32 + place))[:, None] * w[None, :]
            w = tl.load(w1 + h * width + place + 6) * scale
            root = tl.rsqrt(x + 1e-8) * tl.load(norms + tensor * 32 + place + 6)
            total += root[:, None] * w[None, :]
        where = (base + lines)[:, None] * 32 + h[None, :]
        tl.store(layers + where, total, mask=mask[:, None])


@triton.jit
def strip_apply_kernel(
    addresses,
    gradients,
    shapes,
    strips,
    first,
    owner,
    of_tensors,
    decays,
    factors,
    norms,
    scales,
    w1,
    layers,
    w2,
    b2,
    w3,
    b3,
    skipped,
    exp_mult,
    step_mult,
    width,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program moves some rows of a strip of one matrix, or writes their update."""
    PRECISION: tl.constexpr = CONFIG.PRECISION
    SIZE: tl.constexpr = CONFIG.SIZE
    block = tl.program_id(0)
    if ~tl.load(skipped):
        strip, columns, start, stop = strip_of(block, strips, first, owner, SIZE)
        tensor = tl.load(strip + TENSOR)
        tables = addresses, gradients, of_tensors, decays, shapes, factors, tensors
        known = known_of_strip(tables, strip, columns, CONFIG)
        h, k = tl.arange(0, 32), features_of_elements()
        scale = tl.load(scales + tensor * 32 + h)
        first_w = tl.load(w1 + h[None, :] * width + k[:, None]) * scale[None, :]
        norm = tl.load(norms + tensor * 32 + k)
        after, rates = layers_after(w2, b2, w3, b3, scale), rates_of(of_tensors, tensor)
        multipliers, place = (exp_mult, step_mult), (addresses, tensor, tensors)
        wide = tl.load(strip + WIDTH)
        of_rows = layers + tl.load(strip + LINES) * 32 + h
        line = tl.load(strip + HEIGHT) + tl.minimum(columns, wide - 1)
        of_columns = tl.load(of_rows[None, :] + line[:, None] * 32)
        ahead = read_strip(known, start, columns)
        for row in range(start, stop):
            if CONFIG.AHEAD:
                numbers = ahead
                ahead = read_strip(known, tl.minimum(row + 1, stop - 1), columns)
            else:
                numbers = read_strip(known, row, columns)
            tile = strip_tile(known, row, columns, numbers, False) * norm[None, :]
            x = of_columns + tl.load(of_rows + row * 32)[None, :]
            x = after_start(tile, first_w, x, PRECISION)
            elements = row * wide, columns, columns < wide
            move(x, after, elements, rates, multipliers, place, CONFIG)
