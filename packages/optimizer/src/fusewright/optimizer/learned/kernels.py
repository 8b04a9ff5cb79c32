"""Kernels of the learned optimizer's network: what is equal for all elements of a tensor, and the
update of each element.

    f s W1 + b1 = f (s W1) + b1

The factors s of a tensor's features, time and the features that the caller adds make a first layer
of the tensor's own: [28, 32], which the derivative multiplies by, and [32].

The update multiplies in fp16, whose largest number is 65504. Of n elements none is larger than
sqrt(n) once it was divided by their root mean square, and larger tensors are declined. Powers of 2,
of each tensor and unit, bring the first layer's results close to 2^15; the second layer takes them
back, and another one brings its weights there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.statistics.tiles import (
    AT_UPDATE,
    DECAY,
    LENGTH,
    NUMBERS,
    RATE,
    SHAPE_FIELDS,
    TIME,
    feature_tile,
    known_of,
    line_after,
    line_of,
    stretch_of,
)
from ..common.tiles import pointer
from .tiles import hidden, matrix

# Features of an element and of time.
ELEMENT, TIMES = tl.constexpr(28), tl.constexpr(11)


@triton.jit
def filling(most):
    """The power of 2 that brings numbers of at most this size below 2^15, and above 2^14 where they
    are not tiny.
    """
    exponent = tl.maximum(most, 2.0**-20).to(tl.int32, bitcast=True) >> 23
    return ((127 + 127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fold_kernel(
    partials,
    shapes,
    ranges,
    numbers,
    timescales,
    w1,
    b1,
    extra,
    skipped,
    norms,
    folded,
    biases,
    scales,
    extra_count,
    CONFIG: tl.constexpr,
):
    """One program adds the squares of one tensor's features and writes its first layer."""
    ROWS: tl.constexpr = CONFIG.ROWS
    tensor = tl.program_id(0)
    if ~tl.load(skipped):
        shape = shapes + tensor * SHAPE_FIELDS
        k, h = tl.arange(0, 32), tl.arange(0, 32)
        squares = tl.zeros((ROWS, 32), tl.float32)
        for part in tl.static_range(2):
            line = ranges + tensor * 4 + 2 * part
            sums, count = partials + tl.load(line) * 32, tl.load(line + 1)
            for at in range(0, count, ROWS):
                row = at + tl.arange(0, ROWS)
                mask = (row < count)[:, None]
                squares += tl.load(sums + row[:, None] * 32 + k[None, :], mask=mask, other=0.0)
        # One where there are no elements.
        length = tl.maximum(tl.load(shape + LENGTH), 1).to(tl.float32)
        norm = tl.rsqrt(tl.sum(squares, 0) / length + 1e-5)
        norm = tl.where(k < ELEMENT, norm, 0.0)
        tl.store(norms + tensor * 32 + k, norm)
        width = ELEMENT + TIMES + extra_count
        w_element = matrix(w1, ELEMENT, 32, 1, width)
        place = k[:, None] * 32 + h[None, :]
        tl.store(folded + tensor * 1024 + place, w_element * norm[:, None])
        j = tl.arange(0, 16)
        scale = tl.load(timescales + j, mask=j < TIMES, other=1.0)
        t = tl.load(numbers + tensor * NUMBERS + TIME).to(tl.float64)
        # tanh x, in fp64, where nothing cancels.
        time = (1.0 - 2.0 / (tl.exp(2.0 * (t / scale - 1.0)) + 1.0)).to(tl.float32)
        mask = (j < TIMES)[None, :]
        w = tl.load(w1 + h[:, None] * width + ELEMENT + j[None, :], mask=mask, other=0.0)
        bias = tl.load(b1 + h) + tl.sum(w * time[None, :], 1)
        for place in range(0, extra_count):
            x = tl.load(extra + tensor * extra_count + place)
            bias += tl.load(w1 + h * width + ELEMENT + TIMES + place) * x
        tl.store(biases + tensor * 32 + h, bias)
        most = tl.sqrt(length) * tl.sum(tl.abs(w_element), 0) + tl.abs(bias)
        tl.store(scales + tensor * 32 + h, filling(most))


@triton.jit
def layers_after(w2, b2, w3, b3, scales):
    """The layers after the first one, whose results are ``scales`` times too large: the second, of
    which one power of 2 is left, and the last, which takes it back.
    """
    h = tl.arange(0, 32)
    # The least of a layer has the largest results: no weight grows.
    scale = tl.min(scales)
    second_w = matrix(w2, 32, 32, 1, 32) * (scale / scales)[:, None]
    of_second = filling(tl.max(tl.abs(second_w)))
    scale *= of_second
    second = second_w * of_second, tl.load(b2 + h) * scale
    last = tl.load(w3 + h) / scale, tl.load(w3 + 32 + h) / scale
    return second, last, (tl.load(b3), tl.load(b3 + 1))


@triton.jit
def rates_of(numbers, tensor):
    """lr and 1 - lr weight_decay of a tensor."""
    return tl.load(numbers + tensor * NUMBERS + RATE), tl.load(numbers + tensor * NUMBERS + DECAY)


@triton.jit
def move(x, after, elements, rates, multipliers, tables, CONFIG: tl.constexpr):
    """From the first layer's results: moves the parameters at these places of a tensor, or writes
    their update.
    """
    PRECISION: tl.constexpr = CONFIG.PRECISION
    second, last, last_bias = after
    at, offsets, used = elements
    addresses, tensor, tensors = tables
    x = hidden(x, second[0], second[1], PRECISION)
    d = tl.sum(x * last[0][None, :], 1) + last_bias[0]
    e = tl.sum(x * last[1][None, :], 1) + last_bias[1]
    update = d * tl.exp(multipliers[0] * e) * multipliers[1]
    if CONFIG.IN_PLACE:
        place = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED) + at + offsets
        p = tl.load(place, mask=used, other=0).to(tl.float32)
        tl.store(place, (rates[1] * (p - rates[0] * update)).to(CONFIG.P), mask=used)
    else:
        out = pointer(addresses, tensor + AT_UPDATE * tensors, tl.float32, False)
        tl.store(out + at + offsets, update, mask=used)


@triton.jit
def apply_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    row_means,
    norms,
    scales,
    w1,
    biases,
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
    """One program moves a stretch of one tensor, or writes its update."""
    PRECISION: tl.constexpr = CONFIG.PRECISION
    block = tl.program_id(0)
    if ~tl.load(skipped):
        tensor = tl.load(owner + block)
        shape = shapes + tensor * SHAPE_FIELDS
        start, stop = stretch_of(block, tensor, first, shape)
        offsets, h = tl.arange(0, CONFIG.SIZE), tl.arange(0, 32)
        # Before the loop: the compiler must assume that its stores change what is read.
        scale = tl.load(scales + tensor * 32 + h)
        first_w = matrix(w1, ELEMENT, 32, 1, width) * scale[None, :]
        first_bias = tl.load(biases + tensor * 32 + h) * scale
        after, rates = layers_after(w2, b2, w3, b3, scale), rates_of(numbers, tensor)
        multipliers, place = (exp_mult, step_mult), (addresses, tensor, tensors)
        tables = addresses, gradients, numbers, decays, row_means, tensors
        known, line = known_of(tables, tensor, shape, CONFIG), line_of(shape, start)
        for at in range(start, stop, CONFIG.SIZE):
            elements = at, stop, offsets
            tile = feature_tile(known, elements, line, CONFIG, False)
            line = line_after(shape, line, CONFIG.SIZE)
            # Read in the loop all the same: there are too few registers for these.
            tile *= tl.load(norms + tensor * 32 + h)[None, :]
            x = hidden(tile, first_w, first_bias, PRECISION)
            moved = at, offsets, offsets < stop - at
            move(x, after, moved, rates, multipliers, place, CONFIG)
