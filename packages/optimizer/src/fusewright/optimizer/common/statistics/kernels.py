"""Kernels of the learned optimizers' statistics over many tensors: the numbers of a step; and,
after rows and columns, momenta, v and the sum over each tensor of the squares of its features.

    decay = 1 - min((1 - decay0) exp(10 offset), 1)
    m' = decay m + (1 - decay) g    v' = decay v + (1 - decay) g^2

With ``VELO`` weight decay is added to the gradient, and the sums of each tensor's moments are
taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import pointer
from ..tiles_step import decided, members_of, number_of
from .tiles import (
    AT_MOMENTA,
    AT_SQUARE,
    DECAY,
    DECAY_COUNT,
    FACTOR,
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
from .tiles import LENGTH as ELEMENTS

# The numbers of a parameter group; the kernel gets their addresses.
LR, WEIGHT_DECAY = map(tl.constexpr, range(2))
GROUP_NUMBERS = tl.constexpr(2)
# Sums over a tensor before the step: of p^2, three momenta, their squares, v, and v^2.
MOMENT_SUMS = tl.constexpr(9)


@triton.jit
def learned_prepare_kernel(
    partials,
    max_norm,
    grad_scale,
    found_inf,
    group_addresses,
    group_wide,
    groups,
    signs,
    steps,
    momentum_offsets,
    square_offsets,
    factored_offsets,
    decay_complements,
    norm_out,
    skipped_out,
    skipped_count,
    numbers,
    decays,
    partial_count,
    tensors,
    CONFIG: tl.constexpr,
):
    """The one program decides whether the step is taken, counts it, and writes each tensor's line
    of numbers and the decays; it computes in fp64.
    """
    lanes = tl.arange(0, CONFIG.SIZE)
    results = norm_out, skipped_out, skipped_count
    scaler, of_groups = (grad_scale, found_inf), (group_addresses, group_wide)
    factor, skips = decided(partials, partial_count, max_norm, scaler, results, CONFIG)
    which = tl.arange(0, 8)
    learned = which < DECAY_COUNT
    offset = tl.load(momentum_offsets + which, mask=which < 3, other=0.0)
    offset += tl.load(square_offsets + which - 3, mask=which == 3, other=0.0)
    offset += tl.load(factored_offsets + which - 4, mask=(which > 3) & learned, other=0.0)
    complement = tl.load(decay_complements + which, mask=learned, other=0.0)
    complement *= tl.exp(10.0 * offset.to(tl.float64))
    complement = tl.minimum(complement, 1.0)
    tl.store(decays + which, (1.0 - complement).to(tl.float32), mask=learned)
    tl.store(decays + DECAY_COUNT + which, complement.to(tl.float32), mask=learned)
    for start in range(0, tensors, CONFIG.SIZE):
        tensor = start + lanes
        mask, group, sign, place = members_of((groups, signs, steps), tensor, tensors)
        step = tl.load(place, mask=mask, other=0.0)
        tl.store(place, step + 1.0, mask=mask & ~skips)
        lr = number_of(of_groups, group, LR, GROUP_NUMBERS, mask)
        decay = number_of(of_groups, group, WEIGHT_DECAY, GROUP_NUMBERS, mask)
        line = numbers + tensor * NUMBERS
        tl.store(line + FACTOR, (factor * sign).to(tl.float32), mask=mask)
        tl.store(line + TIME, step, mask=mask)
        tl.store(line + RATE, lr.to(tl.float32), mask=mask)
        if CONFIG.VELO:
            tl.store(line + DECAY, decay.to(tl.float32), mask=mask)
        else:
            tl.store(line + DECAY, (1.0 - lr * decay).to(tl.float32), mask=mask)


@triton.jit
def statistics_kernel(
    addresses,
    gradients,
    shapes,
    first,
    owner,
    numbers,
    decays,
    skipped,
    row_means,
    partials,
    moments,
    tensors,
    CONFIG: tl.constexpr,
):
    """One program updates the statistics of a stretch of one tensor and adds the squares of each of
    its features; with ``VELO`` it first adds p^2, the momenta, v and their squares.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    block = tl.program_id(0)
    if ~tl.load(skipped):
        tensor = tl.load(owner + block)
        shape = shapes + tensor * SHAPE_FIELDS
        start, stop = stretch_of(block, tensor, first, shape)
        offsets = tl.arange(0, SIZE)
        squares = tl.zeros((SIZE, 32), tl.float32)
        zeros = tl.zeros((SIZE,), tl.float64)
        p2, s0, s1, s2, q0, q1, q2, sv, qv = (zeros,) * 9
        tables = addresses, gradients, numbers, decays, row_means, tensors
        line = line_of(shape, start)
        for at in range(start, stop, SIZE):
            used = offsets < stop - at
            if CONFIG.VELO:
                p = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED) + at + offsets
                m = pointer(addresses, tensor + AT_MOMENTA * tensors, tl.float32, False) + at
                v = pointer(addresses, tensor + AT_SQUARE * tensors, tl.float32, False) + at
                length = tl.load(shape + ELEMENTS)
                _, p2 = with_one_more(p, used, zeros, p2)
                s0, q0 = with_one_more(m + offsets, used, s0, q0)
                s1, q1 = with_one_more(m + length + offsets, used, s1, q1)
                s2, q2 = with_one_more(m + 2 * length + offsets, used, s2, q2)
                sv, qv = with_one_more(v + offsets, used, sv, qv)
            known, elements = known_of(tables, tensor, shape, CONFIG), (at, stop, offsets)
            tile = feature_tile(known, elements, line, CONFIG, True)
            line = line_after(shape, line, SIZE)
            # Lanes beyond the end have features too.
            tile = tl.where(used[:, None], tile, 0.0)
            squares += tile * tile
        tl.store(partials + block * 32 + tl.arange(0, 32), tl.sum(squares, 0))
        if CONFIG.VELO:
            line = moments + block * MOMENT_SUMS
            sums = (p2, s0, s1, s2, q0, q1, q2, sv, qv)
            for k in tl.static_range(9):
                tl.store(line + k, tl.sum(sums[k]))


@triton.jit
def with_one_more(base, used, total, squares):
    """Sums of numbers and of their squares in fp64, where squares of fp32 are exact: a variance is
    the difference of two.
    """
    x = tl.load(base, mask=used, other=0.0).to(tl.float32).to(tl.float64)
    return total + x, squares + x * x
