"""Kernels of learning rates by group: squares by group, the rates that follow from them, and the
dot products of the hypergradient.

    lr_g = base_g m_g    m = 1 + 0.95 tanh((out - start) / 2) (1 + tanh(out / 2) / 19)
    dots_g = <grad L, p - p'>_g    p - p' = (lr u + (1 - decay) p') / decay, decay = 1 - lr wd
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import elements_of, pointer, read, squares_of
from ..common.tiles_step import DECAY, EPS, NUMBERS, ROOT, STEP_SIZE

# Of a multiplier: half its span, the asymmetry about its start, and its bounds.
HALF_SPAN, ASYMMETRY, LOWEST, HIGHEST = map(tl.constexpr, (0.95, 1 / 19, 0.1, 2.0))
STATISTICS = tl.constexpr(3)
EMA_RATE = tl.constexpr(0.1)


@triton.jit
def group_squares_kernel(
    gradients,
    parameters,
    lengths,
    first,
    owner,
    bounds,
    squares,
    line,
    place,
    CONFIG: tl.constexpr,
):
    """One program adds the squares of some blocks of one group in fp64: of gradients, or of
    parameters in the second line of programs.
    """
    program, blocks = tl.program_id(0), (owner, first, lengths)
    start = tl.load(bounds + program)
    stop = tl.load(bounds + program + 1)
    if tl.program_id(1) == 0:
        total = squares_of(gradients, blocks, start, stop, False, CONFIG.G, CONFIG)
    else:
        total = squares_of(parameters, blocks, start, stop, False, CONFIG.P, CONFIG)
    tl.store(squares + tl.program_id(1) * line + place + program, total)


@triton.jit
def group_dots_kernel(
    addresses,
    gradients,
    lengths,
    first,
    owner,
    bounds,
    numbers,
    dots,
    tensors,
    place,
    CONFIG: tl.constexpr,
):
    """One program adds gradients times how AdamW's last step updated their parameters, over some
    blocks of one group, in fp64; a gradient without an address counts as zero.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    program = tl.program_id(0)
    offsets = tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float64)
    for block in range(tl.load(bounds + program), tl.load(bounds + program + 1)):
        tensor, start, length = elements_of(block, owner, first, lengths, SIZE)
        if tl.load(gradients + tensor) != 0:
            g_base = pointer(gradients, tensor, CONFIG.G, CONFIG.ALIGNED) + start
            p_base = pointer(addresses, tensor, CONFIG.P, CONFIG.ALIGNED) + start
            m_base = pointer(addresses, tensor + tensors, CONFIG.STATE, CONFIG.ALIGNED) + start
            v_base = pointer(addresses, tensor + 2 * tensors, CONFIG.STATE, CONFIG.ALIGNED) + start
            g = read(g_base, offsets, length, False).to(tl.float32)
            p = read(p_base, offsets, length, False).to(tl.float32)
            m = read(m_base, offsets, length, False).to(tl.float32)
            v = read(v_base, offsets, length, False).to(tl.float32)
            line = numbers + tensor * NUMBERS
            # eps may be zero, and then 0 / 0 where there is no element.
            root = tl.sqrt_rn(v) * tl.load(line + ROOT) + tl.load(line + EPS)
            moved = tl.where(offsets < length, tl.load(line + STEP_SIZE) * tl.div_rn(m, root), 0.0)
            decay = tl.load(line + DECAY)
            moved = (moved + (1.0 - decay) * p) / decay
            total += g.to(tl.float64) * moved.to(tl.float64)
    tl.store(dots + place + program, tl.sum(total, 0))


@triton.jit
def control_kernel(
    squares,
    owner,
    depths,
    layers,
    base,
    loss,
    grad_scale,
    found_inf,
    statistics,
    multipliers,
    rates,
    ema,
    found_out,
    network_start,
    partial_count,
    hidden,
    CONFIG: tl.constexpr,
):
    """One program gives one group its statistics, multiplier and learning rate; the first one also
    adds the loss to its mean and says whether the step is taken. Nothing but the learning rate
    changes where the loss is not finite.
    """
    group = tl.program_id(0)
    now = tl.load(loss)
    goes_on = tl.abs(now) < float("inf")
    m = tl.load(multipliers + group)
    if CONFIG.UPDATES:
        gradient, parameter, finite = norms_of(squares, owner, group, partial_count, CONFIG.SIZE)
        if CONFIG.HAS_SCALE:
            gradient /= tl.abs(tl.load(grad_scale).to(tl.float64))
            finite = finite & (gradient < float("inf"))
        depth = tl.load(depths + group)
        line = statistics + group * STATISTICS
        tl.store(line, gradient.to(tl.float32), mask=goes_on)
        tl.store(line + 1, parameter.to(tl.float32), mask=goes_on)
        tl.store(line + 2, depth, mask=goes_on)
        if CONFIG.LOG:
            gradient = tl.log(1.0 + gradient)
            parameter = tl.log(1.0 + parameter)
        inputs = gradient.to(tl.float32), parameter.to(tl.float32), depth
        out = network(layers, inputs, hidden, CONFIG)
        multiplier = tl.where(finite, multiplier_of(out, network_start), 1.0)
        m = tl.where(goes_on, multiplier, m)
        tl.store(multipliers + group, m)
    tl.store(rates + group, tl.load(base + group) * m.to(tl.float64))
    if group == 0:
        mean = tl.load(ema)
        # NaN before the first loss.
        later = tl.where(mean == mean, mean + EMA_RATE * (now - mean), now)
        tl.store(ema, later, mask=goes_on)
        skips = ~goes_on
        if CONFIG.HAS_FOUND:
            skips = skips | (tl.load(found_inf) > 0.0)
        tl.store(found_out, skips.to(tl.float32))


@triton.jit
def norms_of(squares, owner, group, partial_count, SIZE: tl.constexpr):
    """Norms of a group's gradients and parameters, and whether those of all groups are finite in
    fp32.
    """
    lanes = tl.arange(0, SIZE)
    gradients = tl.zeros((SIZE,), tl.float64)
    parameters = tl.zeros((SIZE,), tl.float64)
    all_groups = tl.zeros((SIZE,), tl.float64)
    for start in range(0, partial_count, SIZE):
        at = start + lanes
        mask = at < partial_count
        in_group = tl.load(owner + at, mask=mask, other=-1) == group
        of_gradients = tl.load(squares + at, mask=mask, other=0.0)
        of_parameters = tl.load(squares + partial_count + at, mask=mask, other=0.0)
        gradients += tl.where(in_group, of_gradients, 0.0)
        parameters += tl.where(in_group, of_parameters, 0.0)
        all_groups += of_gradients + of_parameters
    finite = tl.sqrt(tl.sum(all_groups, 0)).to(tl.float32) < float("inf")
    return tl.sqrt(tl.sum(gradients, 0)), tl.sqrt(tl.sum(parameters, 0)), finite


@triton.jit
def network(layers, inputs, hidden, CONFIG: tl.constexpr):
    """A perceptron of three inputs and one output; ``layers`` has the addresses of weights and
    biases.
    """
    LAYERS: tl.constexpr = CONFIG.LAYERS
    x, y, z = inputs
    at = tl.arange(0, CONFIG.HIDDEN)
    mask = at < hidden
    weight = tl.load(layers).to(tl.pointer_type(tl.float32))
    bias = tl.load(layers + 1).to(tl.pointer_type(tl.float32))
    h = tl.load(bias + at, mask=mask, other=0.0)
    h += tl.load(weight + 3 * at, mask=mask, other=0.0) * x
    h += tl.load(weight + 3 * at + 1, mask=mask, other=0.0) * y
    h += tl.load(weight + 3 * at + 2, mask=mask, other=0.0) * z
    h = rectified(h)
    for layer in tl.static_range(1, LAYERS):
        weight = tl.load(layers + 2 * layer).to(tl.pointer_type(tl.float32))
        bias = tl.load(layers + 2 * layer + 1).to(tl.pointer_type(tl.float32))
        places = at[:, None] * hidden + at[None, :]
        w = tl.load(weight + places, mask=mask[:, None] & mask[None, :], other=0.0)
        h = rectified(tl.sum(w * h[None, :], 1) + tl.load(bias + at, mask=mask, other=0.0))
    weight = tl.load(layers + 2 * LAYERS).to(tl.pointer_type(tl.float32))
    bias = tl.load(layers + 2 * LAYERS + 1).to(tl.pointer_type(tl.float32))
    return tl.sum(tl.load(weight + at, mask=mask, other=0.0) * h, 0) + tl.load(bias)


@triton.jit
def rectified(x):
    """NaN stays, as torch.relu has it."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def multiplier_of(out, start):
    """1 + 0.95 tanh((out - start) / 2) (1 + tanh(out / 2) / 19): 1 where out is not finite."""
    out = tl.where(tl.abs(out) < float("inf"), out, start)
    m = 1.0 + HALF_SPAN * half_tanh(out - start) * (1.0 + half_tanh(out) * ASYMMETRY)
    return tl.minimum(tl.maximum(m, LOWEST), HIGHEST)


@triton.jit
def half_tanh(x):
    """tanh(x / 2)."""
    return 2.0 * tl.sigmoid(x) - 1.0
