"""What Muon and M3 do to the elements of matrices of one shape, before and after the products that
orthogonalise them.

State and directions are ``[matrices, n]``; gradients and parameters are found by tables of
addresses. The first axis of the grid counts matrices; each program of the second takes a span of
the matrix and writes its partial sums over it, in fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import pointer

# The numbers of all matrices: the factor of the gradients, 1 - lr wd, and the rate of the step.
FACTOR, DECAY, RATE = map(tl.constexpr, range(3))
# Of one matrix: a stack of a few large ones has to keep the memory busy.
MAX_PROGRAMS = tl.constexpr(512)


@triton.jit
def sum_of(partials, matrix, programs):
    """Over all programs of a matrix, in a fixed order."""
    lanes = tl.arange(0, MAX_PROGRAMS)
    line = partials + matrix * MAX_PROGRAMS
    return tl.sum(tl.load(line + lanes, mask=lanes < programs, other=0.0), 0)


@triton.jit
def is_skipped(skips, CONFIG: tl.constexpr):
    skipped = tl.full((), 0, tl.int1)
    if CONFIG.HAS_SKIPS:
        skipped = tl.load(skips) != 0
    return skipped


@triton.jit
def muon_momentum_kernel(
    gradients,
    momenta,
    numbers,
    skips,
    squares,
    mu,
    n,
    span,
    CONFIG: tl.constexpr,
):
    """m' = m + (1 - mu) (g - m), and the squares of the direction u = g + mu (m' - g), or m'."""
    SIZE: tl.constexpr = CONFIG.SIZE
    matrix, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    factor, skipped = tl.load(numbers + FACTOR), is_skipped(skips, CONFIG)
    g_base, m_base = pointer(gradients, matrix, CONFIG.G, CONFIG.ALIGNED), momenta + matrix * n
    total = tl.zeros((SIZE,), tl.float64)
    for at in range(program * span, tl.minimum(program * span + span, n), SIZE):
        offsets = at + tl.arange(0, SIZE)
        used = offsets < n
        g = tl.load(g_base + offsets, mask=used, other=0).to(tl.float32) * factor
        m = tl.load(m_base + offsets, mask=used, other=0.0)
        m += (1.0 - mu) * (g - m)
        tl.store(m_base + offsets, m, mask=used & ~skipped)
        u = m
        if CONFIG.NESTEROV:
            u = g + mu * (m - g)
        total += u.to(tl.float64) * u.to(tl.float64)
    tl.store(squares + matrix * MAX_PROGRAMS + program, tl.sum(total, 0))


@triton.jit
def unit_kernel(
    gradients,
    momenta,
    numbers,
    squares,
    out,
    mu,
    n,
    span,
    programs,
    CONFIG: tl.constexpr,
):
    """u / |u| for u = g + mu (m - g), or m; zeros stay zeros, and all is NaN where |u| is not
    finite.
    """
    matrix, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    norm = tl.sqrt(sum_of(squares, matrix, programs))
    # In fp64: one over the norm of small numbers overflows in fp32.
    scale = tl.where(norm < float("inf"), 1.0 / tl.where(norm == 0.0, 1.0, norm), float("nan"))
    factor = tl.load(numbers + FACTOR)
    g_base, m_base = pointer(gradients, matrix, CONFIG.G, CONFIG.ALIGNED), momenta + matrix * n
    out_base = out + matrix * n
    for at in range(program * span, tl.minimum(program * span + span, n), CONFIG.SIZE):
        offsets = at + tl.arange(0, CONFIG.SIZE)
        used = offsets < n
        u = tl.load(m_base + offsets, mask=used, other=0.0)
        if CONFIG.NESTEROV:
            g = tl.load(g_base + offsets, mask=used, other=0).to(tl.float32) * factor
            u = g + mu * (u - g)
        u = (u.to(tl.float64) * scale).to(tl.float32)
        tl.store(out_base + offsets, u.to(out.dtype.element_ty), mask=used)


@triton.jit
def muon_move_kernel(
    parameters,
    direction,
    numbers,
    skips,
    n,
    span,
    CONFIG: tl.constexpr,
):
    """p' = (1 - lr wd) p - rate o."""
    matrix, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if ~is_skipped(skips, CONFIG):
        decay, rate = tl.load(numbers + DECAY), tl.load(numbers + RATE)
        p_base, o_base = (
            pointer(parameters, matrix, CONFIG.P, CONFIG.ALIGNED),
            direction + matrix * n,
        )
        for at in range(program * span, tl.minimum(program * span + span, n), CONFIG.SIZE):
            offsets = at + tl.arange(0, CONFIG.SIZE)
            used = offsets < n
            p = tl.load(p_base + offsets, mask=used, other=0).to(tl.float32)
            o = tl.load(o_base + offsets, mask=used, other=0).to(tl.float32)
            tl.store(p_base + offsets, (decay * p - rate * o).to(CONFIG.P), mask=used)


@triton.jit
def m3_memories_kernel(
    gradients,
    fast,
    second,
    slow,
    numbers,
    skips,
    squares,
    sums,
    a1,
    a2,
    beta1,
    beta2,
    beta3,
    n,
    span,
    CONFIG: tl.constexpr,
):
    """M1' = a1 M1 + beta1 g, V' = a2 V + beta2 g^2, slow momentum plus beta3 g; sums of M1'^2 and
    of V'.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    matrix, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    factor, skipped = tl.load(numbers + FACTOR), is_skipped(skips, CONFIG)
    g_base = pointer(gradients, matrix, CONFIG.G, CONFIG.ALIGNED)
    start = matrix * n
    of_fast, of_second = tl.zeros((SIZE,), tl.float64), tl.zeros((SIZE,), tl.float64)
    for at in range(program * span, tl.minimum(program * span + span, n), SIZE):
        offsets = at + tl.arange(0, SIZE)
        used = offsets < n
        g = tl.load(g_base + offsets, mask=used, other=0).to(tl.float32) * factor
        m = a1 * tl.load(fast + start + offsets, mask=used, other=0.0) + beta1 * g
        v = a2 * tl.load(second + start + offsets, mask=used, other=0.0) + beta2 * g * g
        s = tl.load(slow + start + offsets, mask=used, other=0.0) + beta3 * g
        tl.store(fast + start + offsets, m, mask=used & ~skipped)
        tl.store(second + start + offsets, v, mask=used & ~skipped)
        tl.store(slow + start + offsets, s, mask=used & ~skipped)
        of_fast += m.to(tl.float64) * m.to(tl.float64)
        of_second += v.to(tl.float64)
    tl.store(squares + matrix * MAX_PROGRAMS + program, tl.sum(of_fast, 0))
    tl.store(sums + matrix * MAX_PROGRAMS + program, tl.sum(of_second, 0))


@triton.jit
def m3_move_kernel(
    parameters,
    direction,
    slow_direction,
    second,
    numbers,
    skips,
    sums,
    alpha,
    eps,
    n,
    span,
    programs,
    CONFIG: tl.constexpr,
):
    """p' = (1 - lr wd) p - lr (O1 + alpha O2) / (root + eps), root = sqrt(V), or over its root mean
    square.
    """
    matrix, program = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if ~is_skipped(skips, CONFIG):
        decay, rate = tl.load(numbers + DECAY), tl.load(numbers + RATE)
        scale = tl.full((), 1.0, tl.float32)
        if CONFIG.RELATIVE:
            mean = sum_of(sums, matrix, programs) / n
            scale = (1.0 / tl.sqrt(tl.where(mean == 0.0, 1.0, mean))).to(tl.float32)
        p_base, start = pointer(parameters, matrix, CONFIG.P, CONFIG.ALIGNED), matrix * n
        for at in range(program * span, tl.minimum(program * span + span, n), CONFIG.SIZE):
            offsets = at + tl.arange(0, CONFIG.SIZE)
            used = offsets < n
            p = tl.load(p_base + offsets, mask=used, other=0).to(tl.float32)
            o = tl.load(direction + start + offsets, mask=used, other=0.0).to(tl.float32)
            o += alpha * tl.load(slow_direction + start + offsets, mask=used, other=0.0)
            v = tl.load(second + start + offsets, mask=used, other=0.0)
            root = tl.sqrt_rn(v) * scale + eps
            # 0 / 0 would be NaN beyond the last element.
            moved = decay * p - rate * tl.div_rn(o, tl.where(used, root, 1.0))
            tl.store(p_base + offsets, moved.to(CONFIG.P), mask=used)
