"""Triton kernels of sinkhorn_knopp: matrices stay in registers through all iterations.

A block of matrices is a tile [matrix, row, column], in the log domain of their logarithms. What
pads it is zero, its logarithm -inf, and is divided by 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import row_offset
from .reference import LOWEST_LOGIT

LOWEST = tl.constexpr(LOWEST_LOGIT)


@triton.jit
def load_matrices(operand, matrix, inside, other, n: tl.constexpr, SIZE: tl.constexpr):
    """The matrices of these numbers in fp32, ``other`` where nothing is inside. ``operand`` is a
    pointer and the strides of its rows.
    """
    pointer, strides = operand
    line = tl.arange(0, SIZE)
    row = matrix[:, None] * n + line[None, :]
    offset = row_offset(row, *strides)
    at = pointer + offset[:, :, None] + line[None, None, :]
    return tl.load(at, mask=inside, other=other).to(tl.float32)


@triton.jit
def store_matrices(pointer, value, matrix, inside, n: tl.constexpr, SIZE: tl.constexpr):
    """Write the matrices of these numbers to a contiguous tensor."""
    line = tl.arange(0, SIZE)
    row = matrix.to(tl.int64)[:, None] * n + line[None, :]
    at = pointer + row[:, :, None] * n + line[None, None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def inside_of(matrix, matrices, n: tl.constexpr, SIZE: tl.constexpr):
    """Which lines of a block, rows as well as columns, and which elements are there."""
    line = tl.arange(0, SIZE)
    lines = (matrix < matrices)[:, None] & (line < n)[None, :]
    return lines, lines[:, :, None] & (line < n)[None, None, :]


@triton.jit
def start(x, lines, LOG: tl.constexpr):
    """The matrices before the first step: exp(x - max(x) of each row), or its logarithm.

    In the linear domain what is far below that maximum is zero, as in the reference.
    """
    top = tl.where(lines, tl.max(x, 2), 0.0)
    shifted = x - top[:, :, None]
    return shifted if LOG else tl.where(shifted < LOWEST, 0.0, tl.exp(shifted))


@triton.jit
def divided(state, eps, lines, AXIS: tl.constexpr, LOG: tl.constexpr):
    """One step: the matrices divided by their sums along the axis, and these sums, or the
    logarithms of both.
    """
    if LOG:
        top = tl.where(lines, tl.max(state, AXIS), 0.0)
        total = tl.sum(tl.exp(state - tl.expand_dims(top, AXIS)), AXIS)
        sums = top + tl.log(tl.where(lines, total, 1.0))
        return state - tl.expand_dims(sums, AXIS), sums
    else:
        sums = tl.where(lines, tl.sum(state, AXIS) + eps, 1.0)
        return state * tl.expand_dims(1.0 / sums, AXIS), sums


@triton.jit
def multiplied(state, sums, AXIS: tl.constexpr, LOG: tl.constexpr):
    """The matrices before a step that divided them by these sums."""
    sums = tl.expand_dims(sums, AXIS)
    return state + sums if LOG else state * sums


@triton.jit
def value_of(state, LOG: tl.constexpr):
    return tl.exp(state) if LOG else state


@triton.jit
def undone(grad, state, AXIS: tl.constexpr, LOG: tl.constexpr):
    """The gradient of the logarithm of the matrices before the step that made ``state``, from that
    after it.
    """
    return grad - value_of(state, LOG) * tl.expand_dims(tl.sum(grad, AXIS), AXIS)


@triton.jit
def sinkhorn_forward_kernel(
    x_ptr,
    y_ptr,
    eps,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    matrices,
    iterations,
    n: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program normalises BLOCK matrices."""
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lines, inside = inside_of(matrix, matrices, n, SIZE)
    x_rows = x_ptr, (x_inner_rows, x_outer_stride, x_inner_stride)
    x = load_matrices(x_rows, matrix, inside, -float("inf"), n, SIZE)
    state = start(x, lines, LOG)
    for iteration in range(iterations):
        # The sums of the first rows are at least 1.
        state, _ = divided(state, tl.where(iteration > 0, eps, 0.0), lines, 2, LOG)
        state, _ = divided(state, eps, lines, 1, LOG)
    store_matrices(y_ptr, value_of(state, LOG), matrix, inside, n, SIZE)


@triton.jit
def sinkhorn_backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    sums_ptr,
    eps,
    dy_inner_rows,
    dy_outer_stride,
    dy_inner_stride,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    matrices,
    iterations,
    n: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program takes every num_programs-th block of BLOCK matrices: forward through the
    iterations, then back.

    On the way it leaves the sums of each step in its own part of ``sums``, [programs, iterations,
    2, BLOCK, SIZE].
    """
    step: tl.constexpr = BLOCK * SIZE
    first = tl.program_id(0)
    element = tl.arange(0, BLOCK)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    rows_at = sums_ptr + first.to(tl.int64) * iterations * (2 * step) + element
    columns_at = rows_at + step
    x_rows = x_ptr, (x_inner_rows, x_outer_stride, x_inner_stride)
    dy_rows = dy_ptr, (dy_inner_rows, dy_outer_stride, dy_inner_stride)

    for block in range(first, tl.cdiv(matrices, BLOCK), tl.num_programs(0)):
        matrix = block * BLOCK + tl.arange(0, BLOCK)
        lines, inside = inside_of(matrix, matrices, n, SIZE)
        x = load_matrices(x_rows, matrix, inside, -float("inf"), n, SIZE)
        state = start(x, lines, LOG)
        for iteration in range(iterations):
            state, rows = divided(state, tl.where(iteration > 0, eps, 0.0), lines, 2, LOG)
            state, columns = divided(state, eps, lines, 1, LOG)
            tl.store(rows_at + iteration * (2 * step), rows)
            tl.store(columns_at + iteration * (2 * step), columns)

        # What one thread has left there another reads.
        tl.debug_barrier()
        dy = load_matrices(dy_rows, matrix, inside, 0.0, n, SIZE)
        # The gradient of the matrices' logarithms, from here to the end.
        grad = dy * value_of(state, LOG)
        for back in range(iterations):
            iteration = iterations - 1 - back
            rows = tl.load(rows_at + iteration * (2 * step))
            columns = tl.load(columns_at + iteration * (2 * step))
            grad = undone(grad, state, 1, LOG)
            state = multiplied(state, columns, 1, LOG)
            grad = undone(grad, state, 2, LOG)
            state = multiplied(state, rows, 2, LOG)
        tl.debug_barrier()
        store_matrices(dx_ptr, grad, matrix, inside, n, SIZE)
