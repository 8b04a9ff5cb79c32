"""Triton kernels of the pooled update, forward, in the order in which they run.

    z = k w1^T + b1, h = act(z)        a tile of the hidden layer each
    r = h w2^T + b2 - v, e = w * r     a tile of the output each; the loss of the tile
    p = (e w2) * act'(z)               a tile of the hidden layer each
    G = c (p^T k, sum p, e^T h, sum e) a tile of one of the four each; the squares of the tile
    S' = eta S - theta clip(G)         elements, with the sum of all squares
    W' = (1 - alpha) W + S'

w are the row weights. c, twice the factor of the loss, comes last, so that no product's operand is
smaller than necessary. Each tile also stores the sums of its columns of e and p, taken before they
are rounded, for the sums over rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand
from ..common.tiles import activated
from .tiles import (
    after_the_launch_before,
    column_major,
    elements_of_tile,
    is_finite,
    part_of_program,
    product,
    row_major,
    start_of_problem,
    store_column_sums,
    store_operand,
    sum_of_partials,
    tile_of_program,
)


@triton.jit
def round_weights_kernel(
    w1_ptr,
    w2_ptr,
    w1_out_ptr,
    w2_out_ptr,
    elements,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program rounds BLOCK elements of w1 and of w2, of all problems, for narrow products."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    DTYPE: tl.constexpr = w1_out_ptr.dtype.element_ty
    w1 = tl.load(w1_ptr + at, mask=inside)
    w2 = tl.load(w2_ptr + at, mask=inside)
    tl.store(w1_out_ptr + at, as_operand(w1, DTYPE, UPCAST), mask=inside)
    tl.store(w2_out_ptr + at, as_operand(w2, DTYPE, UPCAST), mask=inside)


@triton.jit
def hidden_kernel(
    k_ptr,
    w1_ptr,
    b1_ptr,
    z_ptr,
    h_ptr,
    h_transposed_ptr,
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
    """One program computes a tile of z and of h."""
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, hidden, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * BLOCK_M
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_ptr += start_of_problem(problem, k_inner, k_outer_stride, k_inner_stride)
    w1_ptr += problem.to(tl.int64) * hidden * width
    z = product(
        row_major(k_ptr, row_tile, rows, k_row_stride, BLOCK_M, BLOCK_K),
        row_major(w1_ptr, col_tile, hidden, width, BLOCK_N, BLOCK_K),
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
    b1_at = b1_ptr + problem.to(tl.int64) * hidden + col
    z += tl.load(b1_at, mask=col < hidden, other=0.0)[None, :]
    h, _, _ = activated(z, ACTIVATION)
    inside = (row < rows)[:, None] & (col < hidden)[None, :]
    tl.store(elements_of_tile(z_ptr, first, hidden, col, BLOCK_M), z, mask=inside)
    store_operand(
        h_ptr,
        h_transposed_ptr,
        h,
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
def residual_kernel(
    h_ptr,
    w2_ptr,
    b2_ptr,
    v_ptr,
    row_weights_ptr,
    e_ptr,
    e_transposed_ptr,
    sums_ptr,
    losses_ptr,
    v_inner,
    v_outer_stride,
    v_inner_stride,
    v_row_stride,
    rows,
    width,
    hidden,
    HAS_ROW_WEIGHTS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes a tile of e, the sums of its columns and its sum of e * r."""
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, width, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    h_ptr += problem.to(tl.int64) * rows * hidden
    w2_ptr += problem.to(tl.int64) * width * hidden
    r = product(
        row_major(h_ptr, row_tile, rows, hidden, BLOCK_M, BLOCK_K),
        row_major(w2_ptr, col_tile, width, hidden, BLOCK_N, BLOCK_K),
        col,
        width,
        hidden,
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
    inside = (row < rows)[:, None] & (col < width)[None, :]
    b2_at = b2_ptr + problem.to(tl.int64) * width + col
    r += tl.load(b2_at, mask=col < width, other=0.0)[None, :]
    v_ptr += start_of_problem(problem, v_inner, v_outer_stride, v_inner_stride)
    v_at = elements_of_tile(v_ptr, (row_tile * BLOCK_M).to(tl.int64), v_row_stride, col, BLOCK_M)
    r -= tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
    r = tl.where(inside, r, 0.0)
    e = r
    if HAS_ROW_WEIGHTS:
        weights_at = row_weights_ptr + problem.to(tl.int64) * rows + row
        e = r * tl.load(weights_at, mask=row < rows, other=0.0)[:, None]
    row_tiles, col_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    loss_at = (problem.to(tl.int64) * row_tiles + row_tile) * col_tiles + col_tile
    tl.store(losses_ptr + loss_at, tl.sum(tl.sum(e * r, 1), 0))
    store_column_sums(sums_ptr, e, problem, row_tile, row_tiles, col, width)
    store_operand(
        e_ptr,
        e_transposed_ptr,
        e,
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
def slope_kernel(
    e_ptr,
    w2_ptr,
    z_ptr,
    p_ptr,
    p_transposed_ptr,
    sums_ptr,
    rows,
    width,
    hidden,
    ACTIVATION: tl.constexpr,
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
    """One program computes a tile of p and the sums of its columns. ``TRANSPOSED``: w2 is stored as
    its transpose.
    """
    after_the_launch_before(OVERLAPS)
    problem, row_tile, col_tile = tile_of_program(rows, hidden, BLOCK_M, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * BLOCK_M
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    e_ptr += problem.to(tl.int64) * rows * width
    w2_ptr += problem.to(tl.int64) * width * hidden
    if TRANSPOSED:
        w2_at = row_major(w2_ptr, col_tile, hidden, width, BLOCK_N, BLOCK_K)
    else:
        w2_at = column_major(w2_ptr, col, hidden, BLOCK_K)
    dh = product(
        row_major(e_ptr, row_tile, rows, width, BLOCK_M, BLOCK_K),
        w2_at,
        col,
        hidden,
        width,
        hidden,
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
    z = tl.load(elements_of_tile(z_ptr, first, hidden, col, BLOCK_M), mask=inside, other=0.0)
    _, slope, _ = activated(z, ACTIVATION)
    p = tl.where(inside, dh * slope, 0.0)
    store_column_sums(sums_ptr, p, problem, row_tile, tl.cdiv(rows, BLOCK_M), col, hidden)
    store_operand(
        p_ptr,
        p_transposed_ptr,
        p,
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
def step_elements(
    w_ptr,
    s_ptr,
    g_ptr,
    w_out_ptr,
    s_out_ptr,
    squares_ptr,
    problem,
    first,
    size,
    slots,
    alpha,
    eta,
    theta,
    max_norm,
    CLIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The step of BLOCK elements of one tensor, and the square of the gradient's norm. Everything
    is loaded before the norm is summed, so that the GPU waits once.
    """
    at = problem.to(tl.int64) * size + first + tl.arange(0, BLOCK)
    inside = first + tl.arange(0, BLOCK) < size
    w = tl.load(w_ptr + at, mask=inside)
    s = tl.load(s_ptr + at, mask=inside)
    g = tl.load(g_ptr + at, mask=inside)
    norm = tl.sqrt_rn(sum_of_partials(squares_ptr, problem, slots))
    rate = theta
    if CLIPS:
        rate = tl.where(norm > max_norm, theta * (max_norm / norm), theta)
    s_new = eta * s - rate * g
    w_new = (1.0 - alpha) * w + s_new
    finite = is_finite(norm)
    tl.store(w_out_ptr + at, tl.where(finite, w_new, w), mask=inside)
    tl.store(s_out_ptr + at, tl.where(finite, s_new, s), mask=inside)
    return norm


@triton.jit
def step_kernel(
    w1_ptr,
    b1_ptr,
    w2_ptr,
    b2_ptr,
    s1_ptr,
    c1_ptr,
    s2_ptr,
    c2_ptr,
    g1_ptr,
    d1_ptr,
    g2_ptr,
    d2_ptr,
    alpha_ptr,
    eta_ptr,
    theta_ptr,
    squares_ptr,
    losses_ptr,
    w1_out_ptr,
    b1_out_ptr,
    w2_out_ptr,
    b2_out_ptr,
    s1_out_ptr,
    c1_out_ptr,
    s2_out_ptr,
    c2_out_ptr,
    loss_ptr,
    norm_ptr,
    skipped_ptr,
    half_factor,
    max_norm,
    width,
    hidden,
    programs,
    slots,
    loss_tiles,
    CLIPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes BLOCK elements of one tensor of W' and S', a problem's first program its
    loss and norm too. S is (s1, c1, s2, c2), the gradient (g1, d1, g2, d2).
    """
    after_the_launch_before(OVERLAPS)
    problem = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs
    alpha = tl.load(alpha_ptr + problem)
    eta = tl.load(eta_ptr + problem)
    theta = tl.load(theta_ptr + problem)
    part, first = part_of_program(tile, width, hidden, BLOCK)
    matrix = tl.cast(hidden, tl.int64) * width
    if part == 0:
        norm = step_elements(
            w1_ptr,
            s1_ptr,
            g1_ptr,
            w1_out_ptr,
            s1_out_ptr,
            squares_ptr,
            problem,
            first,
            matrix,
            slots,
            alpha,
            eta,
            theta,
            max_norm,
            CLIPS,
            BLOCK,
        )
        if tile == 0:
            loss = half_factor * sum_of_partials(losses_ptr, problem, loss_tiles)
            tl.store(loss_ptr + problem, loss)
            tl.store(norm_ptr + problem, norm)
            tl.store(skipped_ptr + problem, ~is_finite(norm))
    elif part == 1:
        step_elements(
            w2_ptr,
            s2_ptr,
            g2_ptr,
            w2_out_ptr,
            s2_out_ptr,
            squares_ptr,
            problem,
            first,
            matrix,
            slots,
            alpha,
            eta,
            theta,
            max_norm,
            CLIPS,
            BLOCK,
        )
    elif part == 2:
        step_elements(
            b1_ptr,
            c1_ptr,
            d1_ptr,
            b1_out_ptr,
            c1_out_ptr,
            squares_ptr,
            problem,
            first,
            hidden,
            slots,
            alpha,
            eta,
            theta,
            max_norm,
            CLIPS,
            BLOCK,
        )
    else:
        step_elements(
            b2_ptr,
            c2_ptr,
            d2_ptr,
            b2_out_ptr,
            c2_out_ptr,
            squares_ptr,
            problem,
            first,
            width,
            slots,
            alpha,
            eta,
            theta,
            max_norm,
            CLIPS,
            BLOCK,
        )
