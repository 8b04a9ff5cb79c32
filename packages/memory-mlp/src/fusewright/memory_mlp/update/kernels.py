"""Triton kernels of the pooled update, forward, in the order in which they run.

    z = k w1^T + b1, h = act(z)        a tile of the hidden layer each
    r = h w2^T + b2 - v, e = w * r     a tile of the output each; the loss of the tile
    dh = e w2, p = dh * act'(z)        a tile of the hidden layer each
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
    exists,
    is_finite,
    load_bias,
    load_rounded,
    load_row_weights,
    part_of_program,
    product,
    residual_of,
    start_of_problem,
    store_column_sums,
    store_operand,
    store_rounded,
    sum_of_partials,
    tile_of_program,
    within_range,
)


@triton.jit
def round_weights_kernel(w1_ptr, w2_ptr, w1_out_ptr, w2_out_ptr, elements, CONFIG: tl.constexpr):
    """One program rounds BLOCK elements of w1 and of w2, of all problems, for narrow products."""
    at = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)
    inside = at < elements
    DTYPE: tl.constexpr = w1_out_ptr.dtype.element_ty
    w1 = tl.load(w1_ptr + at, mask=inside)
    w2 = tl.load(w2_ptr + at, mask=inside)
    tl.store(w1_out_ptr + at, as_operand(w1, DTYPE, CONFIG.UPCAST), mask=inside)
    tl.store(w2_out_ptr + at, as_operand(w2, DTYPE, CONFIG.UPCAST), mask=inside)


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
    CONFIG: tl.constexpr,
):
    """One program computes a tile of z and of h."""
    tile = tile_of_program(rows, hidden, CONFIG)
    k_ptr += start_of_problem(tile.problem, k_inner, k_outer_stride, k_inner_stride)
    z = product(k_ptr, k_row_stride, w1_ptr, tile, rows, hidden, width, True, CONFIG)
    z += load_bias(b1_ptr, tile, hidden)
    h, _, _ = activated(z, CONFIG)
    store_rounded(z_ptr, within_range(z, z_ptr.dtype.element_ty), tile, rows, hidden, CONFIG)
    store_operand(h_ptr, h_transposed_ptr, h, tile, rows, hidden, CONFIG)


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
    CONFIG: tl.constexpr,
):
    """One program computes a tile of e, the sums of its columns and its sum of e * r."""
    tile = tile_of_program(rows, width, CONFIG)
    h_ptr += tile.problem.to(tl.int64) * rows * hidden
    r = product(h_ptr, hidden, w2_ptr, tile, rows, width, hidden, True, CONFIG)
    inside = exists(tile, rows, width)
    v_at = v_ptr, v_inner, v_outer_stride, v_inner_stride, v_row_stride
    r = residual_of(r, b2_ptr, v_at, tile, inside, width, CONFIG)
    e = r
    if row_weights_ptr is not None:
        e = r * load_row_weights(row_weights_ptr, tile, rows)
    row_tiles, col_tiles = tl.cdiv(rows, CONFIG.BLOCK_M), tl.cdiv(width, CONFIG.BLOCK_N)
    loss_at = (tile.problem.to(tl.int64) * row_tiles + tile.row_tile) * col_tiles + tile.col_tile
    tl.store(losses_ptr + loss_at, tl.sum(tl.sum(e * r, 1), 0))
    store_column_sums(sums_ptr, e, tile, rows, width, CONFIG)
    store_operand(e_ptr, e_transposed_ptr, e, tile, rows, width, CONFIG)


@triton.jit
def slope_kernel(
    e_ptr,
    w2_ptr,
    z_ptr,
    dh_ptr,
    p_ptr,
    p_transposed_ptr,
    sums_ptr,
    rows,
    width,
    hidden,
    CONFIG: tl.constexpr,
):
    """One program computes a tile of dh = e w2 and of p, and the sums of p's columns.
    ``TRANSPOSED``: w2 is stored as its transpose.
    """
    tile = tile_of_program(rows, hidden, CONFIG)
    e_ptr += tile.problem.to(tl.int64) * rows * width
    dh = product(e_ptr, width, w2_ptr, tile, rows, hidden, width, CONFIG.TRANSPOSED, CONFIG)
    inside = exists(tile, rows, hidden)
    store_rounded(dh_ptr, dh, tile, rows, hidden, CONFIG)
    z = load_rounded(z_ptr, tile, rows, hidden, CONFIG)
    _, slope, _ = activated(z, CONFIG)
    p = tl.where(inside, dh * slope, 0.0)
    store_column_sums(sums_ptr, p, tile, rows, hidden, CONFIG)
    store_operand(p_ptr, p_transposed_ptr, p, tile, rows, hidden, CONFIG)


@triton.jit
def step_elements(tensors, place, size, gates, squares_ptr, slots, max_norm, CONFIG: tl.constexpr):
    """The step of BLOCK elements of one tensor, and the norm of the gradient. Everything is loaded
    before the norm is summed, so that the GPU waits once.
    """
    w_ptr, s_ptr, g_ptr, w_out_ptr, s_out_ptr = tensors
    problem, first = place
    alpha, eta, theta = gates
    at = problem.to(tl.int64) * size + first + tl.arange(0, CONFIG.BLOCK)
    inside = first + tl.arange(0, CONFIG.BLOCK) < size
    w = tl.load(w_ptr + at, mask=inside)
    s = tl.load(s_ptr + at, mask=inside)
    g = tl.load(g_ptr + at, mask=inside)
    norm = tl.sqrt_rn(sum_of_partials(squares_ptr, problem, slots))
    rate = theta
    if CONFIG.CLIPS:
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
    CONFIG: tl.constexpr,
):
    """One program writes BLOCK elements of one tensor of W' and S', a problem's first program its
    loss and norm too. S is (s1, c1, s2, c2), the gradient (g1, d1, g2, d2).
    """
    after_the_launch_before(CONFIG)
    problem = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs
    alpha = tl.load(alpha_ptr + problem)
    eta = tl.load(eta_ptr + problem)
    theta = tl.load(theta_ptr + problem)
    part, first = part_of_program(tile, width, hidden, CONFIG.BLOCK)
    matrix = tl.cast(hidden, tl.int64) * width
    place, gates = (problem, first), (alpha, eta, theta)
    of_w1 = w1_ptr, s1_ptr, g1_ptr, w1_out_ptr, s1_out_ptr
    of_w2 = w2_ptr, s2_ptr, g2_ptr, w2_out_ptr, s2_out_ptr
    of_b1 = b1_ptr, c1_ptr, d1_ptr, b1_out_ptr, c1_out_ptr
    of_b2 = b2_ptr, c2_ptr, d2_ptr, b2_out_ptr, c2_out_ptr
    if part == 0:
        norm = step_elements(of_w1, place, matrix, gates, squares_ptr, slots, max_norm, CONFIG)
        if tile == 0:
            loss = half_factor * sum_of_partials(losses_ptr, problem, loss_tiles)
            tl.store(loss_ptr + problem, loss)
            tl.store(norm_ptr + problem, norm)
            tl.store(skipped_ptr + problem, ~is_finite(norm))
    elif part == 1:
        step_elements(of_w2, place, matrix, gates, squares_ptr, slots, max_norm, CONFIG)
    elif part == 2:
        step_elements(of_b1, place, hidden, gates, squares_ptr, slots, max_norm, CONFIG)
    else:
        step_elements(of_b2, place, width, gates, squares_ptr, slots, max_norm, CONFIG)
