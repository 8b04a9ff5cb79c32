"""Kernels of AdamW: one program prepares the numbers of a step, then one launch updates every
element.

    m' = m + RATE1 (g - m)    v' = BETA2 v + RATE2 g^2    v^ = max(v^, v') for amsgrad
    p' = DECAY p - STEP_SIZE m' / (ROOT sqrt(v^) + EPS)

with RATE1 = 1 - beta1, RATE2 = 1 - beta2, DECAY = 1 - lr wd, STEP_SIZE = lr / (1 - beta1^t) and
ROOT = (1 - beta2^t)^-1/2. Where decay is not decoupled, DECAY = wd and DECAY p is added to g.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import elements_of, pointer, read, write
from ..common.tiles_step import (
    BETA2,
    DECAY,
    EPS,
    FACTOR,
    NUMBERS,
    RATE1,
    RATE2,
    ROOT,
    STEP_SIZE,
    decided,
    members_of,
    number_of,
)

# The numbers of a parameter group; the kernel gets their addresses.
LR, BETA_1, BETA_2, EPSILON, WEIGHT_DECAY = map(tl.constexpr, range(5))
GROUP_NUMBERS = tl.constexpr(5)


@triton.jit
def prepare_kernel(
    partials,
    max_norm,
    grad_scale,
    found_inf,
    group_addresses,
    group_wide,
    groups,
    signs,
    steps,
    norm_out,
    skipped_out,
    skipped_count,
    numbers,
    partial_count,
    tensors,
    CONFIG: tl.constexpr,
):
    """The one program decides whether the step is taken, counts it, and writes each tensor's line
    of numbers; it computes in fp64.
    """
    lanes = tl.arange(0, CONFIG.SIZE)
    results = norm_out, skipped_out, skipped_count
    scaler, of_groups = (grad_scale, found_inf), (group_addresses, group_wide)
    factor, skips = decided(partials, partial_count, max_norm, scaler, results, CONFIG)
    for start in range(0, tensors, CONFIG.SIZE):
        tensor = start + lanes
        mask, group, sign, place = members_of((groups, signs, steps), tensor, tensors)
        step = tl.load(place, mask=mask, other=0.0) + 1.0
        tl.store(place, step, mask=mask & ~skips)
        step = step.to(tl.float64)
        lr = number_of(of_groups, group, LR, GROUP_NUMBERS, mask)
        beta1 = number_of(of_groups, group, BETA_1, GROUP_NUMBERS, mask)
        beta2 = number_of(of_groups, group, BETA_2, GROUP_NUMBERS, mask)
        eps = number_of(of_groups, group, EPSILON, GROUP_NUMBERS, mask)
        decay = number_of(of_groups, group, WEIGHT_DECAY, GROUP_NUMBERS, mask)
        # log 0 is -inf, and 0^step is 0.
        bias1 = 1.0 - tl.exp(step * tl.log(beta1))
        bias2 = 1.0 - tl.exp(step * tl.log(beta2))
        line = numbers + tensor * NUMBERS
        tl.store(line + FACTOR, (factor * sign).to(tl.float32), mask=mask)
        tl.store(line + RATE1, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(line + BETA2, beta2.to(tl.float32), mask=mask)
        tl.store(line + RATE2, (1.0 - beta2).to(tl.float32), mask=mask)
        tl.store(line + STEP_SIZE, (lr / bias1).to(tl.float32), mask=mask)
        tl.store(line + ROOT, (1.0 / tl.sqrt(bias2)).to(tl.float32), mask=mask)
        tl.store(line + EPS, eps.to(tl.float32), mask=mask)
        if CONFIG.DECOUPLED:
            tl.store(line + DECAY, (1.0 - lr * decay).to(tl.float32), mask=mask)
        else:
            tl.store(line + DECAY, decay.to(tl.float32), mask=mask)


@triton.jit
def adamw_kernel(
    addresses,
    gradients,
    lengths,
    first,
    owner,
    numbers,
    skipped,
    steps,
    tensors,
    seed,
    CONFIG: tl.constexpr,
):
    """One program updates ``SIZE`` elements of one tensor, with their state."""
    block = tl.program_id(0)
    tensor, start, length = elements_of(block, owner, first, lengths, CONFIG.SIZE)
    if ~tl.load(skipped):
        offsets = tl.arange(0, CONFIG.SIZE)
        p = pointer(addresses, tensor, CONFIG.PARAMETER, CONFIG.ALIGNED) + start
        g = pointer(gradients, tensor, CONFIG.GRADIENT, CONFIG.ALIGNED) + start
        m = pointer(addresses, tensor + tensors, CONFIG.STATE, CONFIG.ALIGNED) + start
        v = pointer(addresses, tensor + 2 * tensors, CONFIG.STATE, CONFIG.ALIGNED) + start
        most, low = v, p
        if CONFIG.AMSGRAD:
            most = pointer(addresses, tensor + 3 * tensors, CONFIG.STATE, CONFIG.ALIGNED) + start
        if CONFIG.REMAINDER:
            low = pointer(addresses, tensor + 4 * tensors, tl.int16, CONFIG.ALIGNED) + start
        bits = offsets
        if CONFIG.STOCHASTIC:
            place = tl.load(steps + tensor).to(tl.pointer_type(tl.float32))
            bits = random_bits(seed, tl.load(place).to(tl.int32), tensor, start + offsets)
        bases = p, g, m, v, most, low
        if length >= CONFIG.SIZE:
            move_elements(bases, offsets, length, numbers + tensor * NUMBERS, bits, CONFIG, True)
        else:
            move_elements(bases, offsets, length, numbers + tensor * NUMBERS, bits, CONFIG, False)


@triton.jit
def move_elements(bases, offsets, length, numbers, bits, CONFIG: tl.constexpr, WHOLE: tl.constexpr):
    """The formula above, for the elements of one block."""
    p_base, g_base, m_base, v_base, most_base, low_base = bases
    p = read(p_base, offsets, length, WHOLE).to(tl.float32)
    g = read(g_base, offsets, length, WHOLE).to(tl.float32) * tl.load(numbers + FACTOR)
    m = read(m_base, offsets, length, WHOLE).to(tl.float32)
    v = read(v_base, offsets, length, WHOLE).to(tl.float32)
    decay = tl.load(numbers + DECAY)
    if CONFIG.REMAINDER:
        # The bits of the fp32 parameter are those of p, shifted, plus what rounding took away.
        low = read(low_base, offsets, length, WHOLE).to(tl.int32)
        p = (p.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    if CONFIG.DECOUPLED:
        p *= decay
    else:
        g += decay * p
    m += tl.load(numbers + RATE1) * (g - m)
    v = tl.load(numbers + BETA2) * v + tl.load(numbers + RATE2) * g * g
    bound = v
    if CONFIG.AMSGRAD:
        # NaN stays, as torch.maximum has it.
        most = read(most_base, offsets, length, WHOLE).to(tl.float32)
        bound = tl.maximum(most, v, propagate_nan=tl.PropagateNan.ALL)
        most = in_state(bound, bits >> 8, CONFIG.STOCHASTIC, most_base)
        write(most_base, offsets, length, most, WHOLE)
    root = tl.sqrt_rn(bound) * tl.load(numbers + ROOT) + tl.load(numbers + EPS)
    p -= tl.load(numbers + STEP_SIZE) * tl.div_rn(m, root)
    write(m_base, offsets, length, in_state(m, bits >> 16, CONFIG.STOCHASTIC, m_base), WHOLE)
    write(v_base, offsets, length, in_state(v, bits >> 8, CONFIG.STOCHASTIC, v_base), WHOLE)
    if CONFIG.REMAINDER:
        whole = p.to(tl.int32, bitcast=True)
        # NaN has no neighbours: rounded up, its bits would be those of zero.
        high = tl.where(p == p, (whole + 0x8000) & -0x10000, whole & -0x10000 | 0x400000)
        whole = tl.where(p == p, whole, high)
        write(low_base, offsets, length, (whole - high).to(tl.int16), WHOLE)
        p = high.to(tl.float32, bitcast=True)
    write(p_base, offsets, length, in_state(p, bits, CONFIG.STOCHASTIC, p_base), WHOLE)


@triton.jit
def in_state(x, bits, STOCHASTIC: tl.constexpr, base):
    """x in the dtype of the state, rounded stochastically to bf16 or to the nearest."""
    if STOCHASTIC and base.dtype.element_ty == tl.bfloat16:
        return stochastically_rounded(x, bits).to(tl.bfloat16)
    return x.to(base.dtype.element_ty)


@triton.jit
def random_bits(seed, step, tensor, offsets):
    """32 bits for each element, the same for the same seed, step, tensor and element.

    Two rounds of a multiplicative hash: they take a tenth of Philox's time and are random enough to
    round a number up or down.
    """
    x = offsets.to(tl.uint32) * 0x9E3779B9 + tensor.to(tl.uint32) * 0x85EBCA6B
    x = scrambled(x ^ (seed.to(tl.uint32) + step.to(tl.uint32) * 0xC2B2AE35))
    return scrambled(x + (offsets >> 32).to(tl.uint32) + 0x27D4EB2F)


@triton.jit
def scrambled(x):
    x ^= x >> 16
    x = (x * 0x7FEB352D).to(tl.uint32)
    x ^= x >> 15
    x = (x * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def stochastically_rounded(x, bits):
    """fp32 numbers that bf16 represents, up or down with probabilities that make x the mean."""
    raw = x.to(tl.uint32, bitcast=True)
    up = ((raw + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # Infinity and NaN have no neighbours.
    return tl.where(tl.abs(x) < float("inf"), up, x)
