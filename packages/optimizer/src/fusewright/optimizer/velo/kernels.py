"""Kernels of VeLO: the moments and feature norms of each tensor, and the update of each element by
its tensor's perceptron, 30 -> 4 -> 4 -> 3.

    (d, e, unused) = W3 relu(W2 relu(W1 f + b1) + b2) + b3    p' = p - rate d exp(exp_mult e)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.statistics.kernels import MOMENT_SUMS
from ..common.statistics.tiles import (
    LENGTH,
    NUMBERS,
    PROGRAMS,
    RATE,
    SHAPE_FIELDS,
    at_least,
    feature_tile,
    known_of,
    line_after,
    line_of,
    stretch_of,
)
from ..common.tiles import pointer

# Where a tensor's weights and biases begin in its line: of W1 [4, 32] with the features' norms in
# it, b1, W2 [4, 4], b2, W3 [3, 4] and b3.
OF_W1, OF_B1, OF_W2, OF_B2, OF_W3, OF_B3 = map(tl.constexpr, (0, 128, 132, 148, 152, 164))
# A multiple of what wide accesses need.
LINE = tl.constexpr(176)


@triton.jit
def moments_kernel(
    partials, moment_partials, shapes, first, skipped, norms, moments, CONFIG: tl.constexpr
):
    """One program adds the squares of one tensor's features and its sums, and writes the norms of
    the features and, in fp64, the means of what was summed.
    """
    ROWS: tl.constexpr = CONFIG.ROWS
    tensor = tl.program_id(0)
    if ~tl.load(skipped):
        shape = shapes + tensor * SHAPE_FIELDS
        count, block = tl.load(shape + PROGRAMS), tl.load(first + tensor)
        k, j = tl.arange(0, 32), tl.arange(0, 16)
        squares = tl.zeros((ROWS, 32), tl.float32)
        sums = tl.zeros((ROWS, 16), tl.float64)
        for at in range(0, count, ROWS):
            row = at + tl.arange(0, ROWS)
            mask = (row < count)[:, None]
            place = (block + row)[:, None]
            squares += tl.load(partials + place * 32 + k[None, :], mask=mask, other=0.0)
            sums += tl.load(
                moment_partials + place * MOMENT_SUMS + j[None, :],
                mask=mask & (j < MOMENT_SUMS)[None, :],
                other=0.0,
            )
        length = tl.load(shape + LENGTH)
        norm = tl.rsqrt(tl.sum(squares, 0) / length.to(tl.float32) + 1e-5)
        tl.store(norms + tensor * 32 + k, norm)
        mean = tl.sum(sums, 0) / length.to(tl.float64)
        tl.store(moments + tensor * MOMENT_SUMS + j, mean, mask=j < MOMENT_SUMS)


@triton.jit
def four(at, SIZE: tl.constexpr):
    """Four consecutive numbers, or four consecutive lines of ``SIZE``."""
    if SIZE > 1:
        at += tl.arange(0, SIZE)
    return tl.load(at), tl.load(at + SIZE), tl.load(at + 2 * SIZE), tl.load(at + 3 * SIZE)


@triton.jit
def unit(x, w, b):
    """x w + b, of each line of x."""
    return tl.sum(x * w[None, :], 1) + b


@triton.jit
def hidden_units(x, w, b):
    """``[lines, 4]``: relu(x w + b)."""
    even = tl.join(unit(x, w[0], b[0]), unit(x, w[2], b[2]))
    odd = tl.join(unit(x, w[1], b[1]), unit(x, w[3], b[3]))
    return at_least(tl.reshape(tl.join(even, odd), (x.shape[0], 4)), 0.0)


@triton.jit
def velo_apply_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    row_means,
    perceptrons,
    scales,
    skipped,
    exp_mult,
    step_mult,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program updates a stretch of one tensor."""
    block = tl.program_id(0)
    if ~tl.load(skipped):
        tensor = tl.load(owner + block)
        shape = shapes + tensor * SHAPE_FIELDS
        start, stop = stretch_of(block, tensor, first, shape)
        offsets = tl.arange(0, CONFIG.SIZE)
        network = perceptrons + tensor * LINE
        # Before the loop: the compiler must assume that its stores change what is read.
        first_b, second_w = four(network + OF_B1, 1), four(network + OF_W2, 4)
        second_b, last_w = four(network + OF_B2, 1), four(network + OF_W3, 4)
        direction_b, magnitude_b = tl.load(network + OF_B3), tl.load(network + OF_B3 + 1)
        rate = tl.load(numbers + tensor * NUMBERS + RATE) * tl.load(scales + tensor) * step_mult
        tables = addresses, gradients, numbers, decays, row_means, tensors
        line = line_of(shape, start)
        for at in range(start, stop, CONFIG.SIZE):
            known, elements = known_of(tables, tensor, shape, CONFIG), (at, stop, offsets)
            tile = feature_tile(known, elements, line, CONFIG, False)
            line = line_after(shape, line, CONFIG.SIZE)
            # Read in the loop all the same: there are too few registers for these.
            x = hidden_units(tile, four(network + OF_W1, 32), first_b)
            x = hidden_units(x, second_w, second_b)
            direction = unit(x, last_w[0], direction_b)
            magnitude = unit(x, last_w[1], magnitude_b)
            used = offsets < stop - at
            place = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED) + at + offsets
            p = tl.load(place, mask=used, other=0).to(tl.float32)
            p -= rate * direction * tl.exp(exp_mult * magnitude)
            tl.store(place, p.to(CONFIG.P), mask=used)
