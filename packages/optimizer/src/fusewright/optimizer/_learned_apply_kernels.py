"""Kernels of the learned optimizer's network: the normalisation folded into the first layer, the
update of every element, and its derivative.

    f s W1 + b1 = f (s W1) + b1:   what holds for a whole tensor, the norms s of its features, time
    and what the caller adds, makes a first layer of the tensor's own, [28, 32] and [32].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._elements import pointer
from ._learned_tiles import (
    AT_UPDATE,
    AT_UPSTREAM,
    KEPT,
    LENGTH,
    NUMBERS,
    PROGRAMS,
    RATE,
    SHAPE_FIELDS,
    TIME,
    feature_tile,
    hidden,
    matrix,
    stretch_of,
)

# Of an element, of time.
ELEMENT, TIMES = tl.constexpr(28), tl.constexpr(11)
# Where a program's share of each gradient starts: of W1 [32 features, 32], b1, W2 [32 inputs, 32],
# b2, W3 [2, 32] and b3.
OF_W1, OF_B1, OF_W2, OF_B2, OF_W3, OF_B3, SHARE = map(
    tl.constexpr, (0, 1024, 1056, 2080, 2112, 2176, 2178)
)


@triton.jit
def _fold_kernel(
    partials,
    shapes,
    first,
    numbers,
    timescales,
    w1,
    b1,
    extra,
    skipped,
    norms,
    folded,
    biases,
    extra_count,
    ROWS: tl.constexpr,
):
    """One program adds the squares of one tensor's features and writes its first layer."""
    tensor = tl.program_id(0)
    if ~tl.load(skipped):
        shape = shapes + tensor * SHAPE_FIELDS
        k, h = tl.arange(0, 32), tl.arange(0, 32)
        count = tl.load(shape + PROGRAMS)
        shares = partials + tl.load(first + tensor) * 32
        squares = tl.zeros((ROWS, 32), tl.float32)
        for at in range(0, count, ROWS):
            row = at + tl.arange(0, ROWS)
            mask = (row < count)[:, None]
            squares += tl.load(shares + row[:, None] * 32 + k[None, :], mask=mask, other=0.0)
        # One where there are no elements.
        length = tl.maximum(tl.load(shape + LENGTH), 1).to(tl.float32)
        norm = tl.rsqrt(tl.sum(squares, 0) / length + 1e-5)
        norm = tl.where(k < ELEMENT, norm, 0.0)
        tl.store(norms + tensor * 32 + k, norm)
        width = ELEMENT + TIMES + extra_count
        w = matrix(w1, ELEMENT, 32, 1, width)
        tl.store(folded + tensor * 1024 + k[:, None] * 32 + h[None, :], w * norm[:, None])
        j = tl.arange(0, 16)
        scale = tl.load(timescales + j, mask=j < TIMES, other=1.0)
        t = tl.load(numbers + tensor * NUMBERS + TIME).to(tl.float64)
        # tanh x, in fp64, where nothing cancels.
        time = (1.0 - 2.0 / (tl.exp(2.0 * (t / scale - 1.0)) + 1.0)).to(tl.float32)
        mask = (j < TIMES)[None, :]
        w = tl.load(w1 + h[:, None] * width + ELEMENT + j[None, :], mask=mask, other=0.0)
        bias = tl.load(b1 + h) + tl.sum(w * time[None, :], 1)
        for place in range(0, extra_count):
            given = tl.load(extra + tensor * extra_count + place)
            bias += tl.load(w1 + h * width + ELEMENT + TIMES + place) * given
        tl.store(biases + tensor * 32 + h, bias)


@triton.jit
def _apply_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    middles,
    folded,
    biases,
    w2,
    b2,
    w3,
    b3,
    skipped,
    exp_mult,
    step_mult,
    tensors,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program moves a stretch of one tensor, or writes its update."""
    block = tl.program_id(0)
    if ~tl.load(skipped):
        tensor = tl.load(owner + block)
        shape = shapes + tensor * SHAPE_FIELDS
        start, stop = stretch_of(block, tensor, first, shape)
        offsets, h = tl.arange(0, SIZE), tl.arange(0, 32)
        first_w, first_b = matrix(folded + tensor * 1024, 32, 32, 32, 1), biases + tensor * 32
        second_w = matrix(w2, 32, 32, 1, 32)
        last_d, last_e = tl.load(w3 + h), tl.load(w3 + 32 + h)
        # Before the loop: what is stored there might change what is read.
        first_bias, second_bias = tl.load(first_b + h), tl.load(b2 + h)
        bias_d, bias_e = tl.load(b3), tl.load(b3 + 1)
        rate = tl.load(numbers + tensor * NUMBERS + RATE)
        kept = tl.load(numbers + tensor * NUMBERS + KEPT)
        for at in range(start, stop, SIZE):
            tile = feature_tile(
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
                P,
                G,
                ALIGNED,
                False,
                False,
            )
            x = hidden(tile, first_w, first_bias, PRECISION)
            x = hidden(x, second_w, second_bias, PRECISION)
            d = tl.sum(x * last_d[None, :], 1) + bias_d
            e = tl.sum(x * last_e[None, :], 1) + bias_e
            update = d * tl.exp(exp_mult * e) * step_mult
            used = offsets < stop - at
            if IN_PLACE:
                place = pointer(addresses, tensor, P, ALIGNED) + at + offsets
                p = tl.load(place, mask=used, other=0).to(tl.float32)
                tl.store(place, (kept * p - rate * update).to(P), mask=used)
            else:
                out = pointer(addresses, tensor + AT_UPDATE * tensors, tl.float32, False)
                tl.store(out + at + offsets, update, mask=used)


@triton.jit
def _learned_backward_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    middles,
    norms,
    folded,
    biases,
    w2,
    b2,
    w3,
    b3,
    shares,
    exp_mult,
    step_mult,
    tensors,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program adds a stretch's shares of the gradients of all weights and biases, with features
    and layers computed again.
    """
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
    for at in range(start, stop, SIZE):
        tile = feature_tile(
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
            P,
            G,
            ALIGNED,
            False,
            False,
        )
        # What lies behind the end has features too, and may overflow.
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
    share = shares + block.to(tl.int64) * SHARE
    tl.store(share + OF_W1 + place, of_w1 * norm[:, None])
    tl.store(share + OF_B1 + h, of_b1)
    tl.store(share + OF_W2 + place, of_w2)
    tl.store(share + OF_B2 + h, of_b2)
    tl.store(share + OF_W3 + h, of_w3d)
    tl.store(share + OF_W3 + 32 + h, of_w3e)
    tl.store(share + OF_B3, tl.sum(of_d, 0))
    tl.store(share + OF_B3 + 1, tl.sum(of_e, 0))


@triton.jit
def _add_shares_kernel(shares, shapes, first, sums, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """One program adds some columns of all shares of one tensor, in a fixed order."""
    tensor, part = tl.program_id(0), tl.program_id(1)
    column = part * SIZE + tl.arange(0, SIZE)
    count = tl.load(shapes + tensor * SHAPE_FIELDS + PROGRAMS)
    base = shares + tl.load(first + tensor) * SHARE
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for at in range(0, count, ROWS):
        row = at + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < SHARE)[None, :]
        where = row.to(tl.int64)[:, None] * SHARE + column[None, :]
        total += tl.load(base + where, mask=mask, other=0.0)
    tl.store(sums + tensor * SHARE + column, tl.sum(total, 0), mask=column < SHARE)
