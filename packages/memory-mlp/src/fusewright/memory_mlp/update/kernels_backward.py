"""Triton kernels of the pooled update, backward, over the rows, in the order in which they run.

With A, the cotangent of G, and c, twice the loss's factor:

    p_bar = k A1^T + a1, dh_bar = p_bar * act'(z)                 a tile of the hidden layer each
    e_bar = h A2^T + a2 + dh_bar w2^T, q = w * e_bar + dloss e    a tile of the output each
    z_bar = (e A2 + q w2) * act'(z) + p_bar * dh * act''(z)       a tile of the hidden layer each
    dk = c (p A1 + z_bar w1)                                      a tile of the keys each

dv is -c q; dW gets c z_bar^T k and c (e^T dh_bar + q^T h), which kernels_gradients.py adds. The
residual r = h w2^T + b2 - v and dh = e w2 are recomputed, from operands that are loaded anyway. A
step that was skipped gives its rows zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import activated
from .tiles import (
    after_the_launch_before,
    column_major,
    elements_of_tile,
    is_finite,
    product,
    row_major,
    start_of_problem,
    store_column_sums,
    store_operand,
    tile_of_program,
    two_products,
)


@triton.jit
def p_bar_kernel(
    k_ptr,
    a1_ptr,
    a1_bias_ptr,
    z_ptr,
    norm_ptr,
    p_bar_ptr,
    dh_bar_ptr,
    dh_bar_transposed_ptr,
    k_inner,
    k_outer_stride,
    k_inner_stride,
    k_row_stride,
    rows,
    width,
    hidden,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes a tile of dh_bar and, unless act'' is zero, of p_bar."""
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, hidden, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * BLOCK_M
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_ptr += start_of_problem(problem, k_inner, k_outer_stride, k_inner_stride)
    a1_ptr += problem.to(tl.int64) * hidden * width
    p_bar = product(
        row_major(k_ptr, row_tile, rows, k_row_stride, BLOCK_M, BLOCK_K),
        row_major(a1_ptr, col_tile, hidden, width, BLOCK_N, BLOCK_K),
        col,
        hidden,
        width,
        1,
        True,
        EVEN,
        UPCAST,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        NUM_STAGES,
    )
    bias_at = a1_bias_ptr + problem.to(tl.int64) * hidden + col
    p_bar += tl.load(bias_at, mask=col < hidden, other=0.0)[None, :]
    inside = (row < rows)[:, None] & (col < hidden)[None, :]
    z = tl.load(elements_of_tile(z_ptr, first, hidden, col, BLOCK_M), mask=inside, other=0.0)
    _, slope, _ = activated(z, ACTIVATION)
    finite = is_finite(tl.load(norm_ptr + problem))
    if ACTIVATION != "relu":
        p_bar_at = elements_of_tile(p_bar_ptr, first, hidden, col, BLOCK_M)
        tl.store(p_bar_at, p_bar, mask=inside)
    dh_bar = tl.where(finite, p_bar * slope, 0.0)
    store_operand(
        dh_bar_ptr,
        dh_bar_transposed_ptr,
        dh_bar,
        problem,
        row_tile,
        row,
        col,
        rows,
        hidden,
        UPCAST,
        PRECISION,
        BLOCK_M,
    )


@triton.jit
def e_bar_kernel(
    h_ptr,
    dh_bar_ptr,
    a2_ptr,
    a2_bias_ptr,
    w2_ptr,
    b2_ptr,
    v_ptr,
    row_weights_ptr,
    dloss_ptr,
    norm_ptr,
    q_ptr,
    q_transposed_ptr,
    dv_ptr,
    sums_ptr,
    row_parts_ptr,
    factor,
    v_inner,
    v_outer_stride,
    v_inner_stride,
    v_row_stride,
    rows,
    width,
    hidden,
    HAS_ROW_WEIGHTS: tl.constexpr,
    HAS_DLOSS: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes a tile of q and of dv, the sums of q's columns, and the tile's part of
    the gradients of the row weights.
    """
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, width, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * BLOCK_M
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    hidden_start = problem.to(tl.int64) * rows * hidden
    matrix_start = problem.to(tl.int64) * width * hidden
    e_bar, r = two_products(
        row_major(h_ptr + hidden_start, row_tile, rows, hidden, BLOCK_M, BLOCK_K),
        row_major(a2_ptr + matrix_start, col_tile, width, hidden, BLOCK_N, BLOCK_K),
        row_major(dh_bar_ptr + hidden_start, row_tile, rows, hidden, BLOCK_M, BLOCK_K),
        row_major(w2_ptr + matrix_start, col_tile, width, hidden, BLOCK_N, BLOCK_K),
        col,
        width,
        hidden,
        1,
        HAS_ROW_WEIGHTS or HAS_DLOSS,
        True,
        EVEN,
        UPCAST,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        NUM_STAGES,
    )
    inside = (row < rows)[:, None] & (col < width)[None, :]
    bias_at = problem.to(tl.int64) * width + col
    e_bar += tl.load(a2_bias_ptr + bias_at, mask=col < width, other=0.0)[None, :]
    finite = is_finite(tl.load(norm_ptr + problem))
    q = e_bar
    e = tl.zeros_like(e_bar)
    if HAS_ROW_WEIGHTS or HAS_DLOSS:
        r += tl.load(b2_ptr + bias_at, mask=col < width, other=0.0)[None, :]
        v_ptr += start_of_problem(problem, v_inner, v_outer_stride, v_inner_stride)
        v_at = elements_of_tile(
            v_ptr, (row_tile * BLOCK_M).to(tl.int64), v_row_stride, col, BLOCK_M
        )
        r -= tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
        r = tl.where(inside, r, 0.0)
        e = r
    if HAS_ROW_WEIGHTS:
        weights_at = row_weights_ptr + problem.to(tl.int64) * rows + row
        row_weights = tl.load(weights_at, mask=row < rows, other=0.0)[:, None]
        q = row_weights * e_bar
        e = row_weights * r
        by_weight = e_bar * r
    if HAS_DLOSS:
        dloss = tl.load(dloss_ptr + problem).to(tl.float32)
        q += dloss * e
        if HAS_ROW_WEIGHTS:
            by_weight += 0.5 * dloss * r * r
    if HAS_ROW_WEIGHTS:
        by_weight = tl.where(inside, tl.where(finite, factor * by_weight, 0.0), 0.0)
        col_tiles = tl.cdiv(width, BLOCK_N)
        parts_at = (problem.to(tl.int64) * col_tiles + col_tile) * rows + row
        tl.store(row_parts_ptr + parts_at, tl.sum(by_weight, 1), mask=row < rows)
    q = tl.where(inside, tl.where(finite, q, 0.0), 0.0)
    store_column_sums(sums_ptr, q, problem, row_tile, tl.cdiv(rows, BLOCK_M), col, width)
    if WITH_ROWS:
        dv = (-factor * q).to(dv_ptr.dtype.element_ty)
        tl.store(elements_of_tile(dv_ptr, first, width, col, BLOCK_M), dv, mask=inside)
    store_operand(
        q_ptr,
        q_transposed_ptr,
        q,
        problem,
        row_tile,
        row,
        col,
        rows,
        width,
        UPCAST,
        PRECISION,
        BLOCK_M,
    )


@triton.jit
def add_row_parts(
    parts_ptr, out_ptr, problem, col_tile, row, rows, row_parts, BLOCK_M: tl.constexpr
):
    """The first tile of some rows adds the parts of their weights' gradients, one of each tile of
    q.
    """
    if col_tile == 0:
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        start = problem.to(tl.int64) * row_parts
        for part in tl.range(0, row_parts):
            part_at = parts_ptr + (start + part) * rows + row
            total += tl.load(part_at, mask=row < rows, other=0.0)
        tl.store(out_ptr + problem.to(tl.int64) * rows + row, total, mask=row < rows)


@triton.jit
def z_bar_kernel(
    e_ptr,
    q_ptr,
    a2_ptr,
    w2_ptr,
    z_ptr,
    p_bar_ptr,
    norm_ptr,
    row_parts_ptr,
    z_bar_ptr,
    z_bar_transposed_ptr,
    sums_ptr,
    drow_weights_ptr,
    rows,
    width,
    hidden,
    row_parts,
    ACTIVATION: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes a tile of z_bar and the sums of its columns; the first of its rows also
    adds the parts of the row weights' gradients that the tiles of q stored. ``TRANSPOSED``: A2 and
    w2 are stored as their transposes.
    """
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, hidden, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * BLOCK_M
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_start = problem.to(tl.int64) * rows * width
    matrix_start = problem.to(tl.int64) * width * hidden
    a2_ptr += matrix_start
    w2_ptr += matrix_start
    if TRANSPOSED:
        a2_at = row_major(a2_ptr, col_tile, hidden, width, BLOCK_N, BLOCK_K)
        w2_at = row_major(w2_ptr, col_tile, hidden, width, BLOCK_N, BLOCK_K)
    else:
        a2_at = column_major(a2_ptr, col, hidden, BLOCK_K)
        w2_at = column_major(w2_ptr, col, hidden, BLOCK_K)
    h_bar, dh = two_products(
        row_major(e_ptr + row_start, row_tile, rows, width, BLOCK_M, BLOCK_K),
        a2_at,
        row_major(q_ptr + row_start, row_tile, rows, width, BLOCK_M, BLOCK_K),
        w2_at,
        col,
        hidden,
        width,
        hidden,
        ACTIVATION != "relu",
        TRANSPOSED,
        EVEN,
        UPCAST,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        NUM_STAGES,
    )
    inside = (row < rows)[:, None] & (col < hidden)[None, :]
    at = elements_of_tile(z_ptr, first, hidden, col, BLOCK_M)
    z = tl.load(at, mask=inside, other=0.0)
    _, slope, curve = activated(z, ACTIVATION)
    z_bar = h_bar * slope
    if ACTIVATION != "relu":
        p_bar_at = elements_of_tile(p_bar_ptr, first, hidden, col, BLOCK_M)
        z_bar += tl.load(p_bar_at, mask=inside, other=0.0) * dh * curve
    finite = is_finite(tl.load(norm_ptr + problem))
    z_bar = tl.where(inside, tl.where(finite, z_bar, 0.0), 0.0)
    store_column_sums(sums_ptr, z_bar, problem, row_tile, tl.cdiv(rows, BLOCK_M), col, hidden)
    store_operand(
        z_bar_ptr,
        z_bar_transposed_ptr,
        z_bar,
        problem,
        row_tile,
        row,
        col,
        rows,
        hidden,
        UPCAST,
        PRECISION,
        BLOCK_M,
    )
    if HAS_ROW_WEIGHTS:
        add_row_parts(
            row_parts_ptr, drow_weights_ptr, problem, col_tile, row, rows, row_parts, BLOCK_M
        )


@triton.jit
def dk_kernel(
    p_ptr,
    z_bar_ptr,
    a1_ptr,
    w1_ptr,
    norm_ptr,
    dk_ptr,
    factor,
    rows,
    width,
    hidden,
    TRANSPOSED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes a tile of dk. ``TRANSPOSED``: A1 and w1 are stored transposed."""
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, width, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * BLOCK_M
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    hidden_start = problem.to(tl.int64) * rows * hidden
    matrix_start = problem.to(tl.int64) * width * hidden
    a1_ptr += matrix_start
    w1_ptr += matrix_start
    if TRANSPOSED:
        a1_at = row_major(a1_ptr, col_tile, width, hidden, BLOCK_N, BLOCK_K)
        w1_at = row_major(w1_ptr, col_tile, width, hidden, BLOCK_N, BLOCK_K)
    else:
        a1_at = column_major(a1_ptr, col, width, BLOCK_K)
        w1_at = column_major(w1_ptr, col, width, BLOCK_K)
    dk, _ = two_products(
        row_major(p_ptr + hidden_start, row_tile, rows, hidden, BLOCK_M, BLOCK_K),
        a1_at,
        row_major(z_bar_ptr + hidden_start, row_tile, rows, hidden, BLOCK_M, BLOCK_K),
        w1_at,
        col,
        width,
        hidden,
        width,
        False,
        TRANSPOSED,
        EVEN,
        UPCAST,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        NUM_STAGES,
    )
    inside = (row < rows)[:, None] & (col < width)[None, :]
    finite = is_finite(tl.load(norm_ptr + problem))
    dk = tl.where(finite, factor * dk, 0.0).to(dk_ptr.dtype.element_ty)
    tl.store(elements_of_tile(dk_ptr, first, width, col, BLOCK_M), dk, mask=inside)
