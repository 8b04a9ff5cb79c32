"""Kernels of the derivative of the learned optimizer's network: from the gradients of the updates
to those of its weights and biases.

    x1 = relu(f W1 + b1)    x2 = relu(x1 W2 + b2)    (d, e) = W3 x2 + b3
    update = d exp(exp_mult e) step_mult
    dd = dupdate exp(exp_mult e) step_mult    de = dd d exp_mult

Features and layers are recomputed. Each program writes partial sums over its stretch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.statistics.tiles import (
    AT_UPSTREAM,
    PROGRAMS,
    SHAPE_FIELDS,
    feature_tile,
    known_of,
    line_after,
    line_of,
    stretch_of,
)
from ..common.tiles import pointer
from .tiles import hidden, matrix

# Where each gradient begins in a line of partial sums: of W1 [32 features, 32], b1, W2 [32 inputs,
# 32], b2, W3 [2, 32] and b3.
OF_W1, OF_B1, OF_W2, OF_B2, OF_W3, OF_B3, GRADIENTS = map(
    tl.constexpr, (0, 1024, 1056, 2080, 2112, 2176, 2178)
)


@triton.jit
def learned_backward_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    row_means,
    norms,
    folded,
    biases,
    w2,
    b2,
    w3,
    b3,
    partials,
    exp_mult,
    step_mult,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program adds the gradients of all weights and biases over a stretch of one tensor."""
    SIZE: tl.constexpr = CONFIG.SIZE
    block = tl.program_id(0)
    tensor = tl.load(owner + block)
    shape = shapes + tensor * SHAPE_FIELDS
    start, stop = stretch_of(block, tensor, first, shape)
    offsets, h = tl.arange(0, SIZE), tl.arange(0, 32)
    last_d, last_e = tl.load(w3 + h), tl.load(w3 + 32 + h)
    of_w1, of_w2 = tl.zeros((32, 32), tl.float32), tl.zeros((32, 32), tl.float32)
    of_b1, of_b2 = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
    of_w3d, of_w3e = tl.zeros((32,), tl.float32), tl.zeros((32,), tl.float32)
    of_d, of_e = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    tables = addresses, gradients, numbers, decays, row_means, tensors
    line = line_of(shape, start)
    for at in range(start, stop, SIZE):
        known, elements = known_of(tables, tensor, shape, CONFIG), (at, stop, offsets)
        tile = feature_tile(known, elements, line, CONFIG, False)
        line = line_after(shape, line, SIZE)
        # Lanes beyond the end have features too, which may overflow.
        used = offsets < stop - at
        tile = tl.where(used[:, None], tile, 0.0)
        w = matrix(folded + tensor * 1024, 32, 32, 32, 1)
        x1 = hidden(tile, w, tl.load(biases + tensor * 32 + h), "ieee")
        x2 = hidden(x1, matrix(w2, 32, 32, 1, 32), tl.load(b2 + h), "ieee")
        d = tl.sum(x2 * last_d[None, :], 1) + tl.load(b3)
        e = tl.sum(x2 * last_e[None, :], 1) + tl.load(b3 + 1)
        up = pointer(addresses, tensor + AT_UPSTREAM * tensors, tl.float32, False) + at
        dd = tl.load(up + offsets, mask=used, other=0.0)
        dd *= tl.exp(exp_mult * e) * step_mult
        de = dd * d * exp_mult
        of_d += dd
        of_e += de
        of_w3d += tl.sum(x2 * dd[:, None], 0)
        of_w3e += tl.sum(x2 * de[:, None], 0)
        dx = dd[:, None] * last_d[None, :] + de[:, None] * last_e[None, :]
        dx = tl.where(x2 > 0.0, dx, 0.0)
        of_b2 += tl.sum(dx, 0)
        of_w2 += tl.dot(tl.trans(x1), dx, input_precision="ieee")
        dx = tl.dot(dx, matrix(w2, 32, 32, 32, 1), input_precision="ieee")
        dx = tl.where(x1 > 0.0, dx, 0.0)
        of_b1 += tl.sum(dx, 0)
        of_w1 += tl.dot(tl.trans(tile), dx, input_precision="ieee")
    norm = tl.load(norms + tensor * 32 + h)
    place = h[:, None] * 32 + h[None, :]
    line = partials + block.to(tl.int64) * GRADIENTS
    tl.store(line + OF_W1 + place, of_w1 * norm[:, None])
    tl.store(line + OF_B1 + h, of_b1)
    tl.store(line + OF_W2 + place, of_w2)
    tl.store(line + OF_B2 + h, of_b2)
    tl.store(line + OF_W3 + h, of_w3d)
    tl.store(line + OF_W3 + 32 + h, of_w3e)
    tl.store(line + OF_B3, tl.sum(of_d, 0))
    tl.store(line + OF_B3 + 1, tl.sum(of_e, 0))


@triton.jit
def add_partials_kernel(partials, shapes, first, sums, CONFIG: tl.constexpr):
    """One program adds some columns of all partial sums of one tensor, in a fixed order."""
    ROWS: tl.constexpr = CONFIG.ROWS
    SIZE: tl.constexpr = CONFIG.SIZE
    tensor, part = tl.program_id(0), tl.program_id(1)
    column = part * SIZE + tl.arange(0, CONFIG.SIZE)
    count = tl.load(shapes + tensor * SHAPE_FIELDS + PROGRAMS)
    base = partials + tl.load(first + tensor) * GRADIENTS
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for at in range(0, count, ROWS):
        row = at + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < GRADIENTS)[None, :]
        where = row.to(tl.int64)[:, None] * GRADIENTS + column[None, :]
        total += tl.load(base + where, mask=mask, other=0.0)
    tl.store(sums + tensor * GRADIENTS + column, tl.sum(total, 0), mask=column < GRADIENTS)
