"""Triton kernels of the pooled update, backward, in the order in which they run.

Over the elements of weights and momentum, of the gradients u_w of W' and u_s of S', with
U = u_w + u_s:

    <u_w, W>, <U, S>, <U, G>        and the weights as operands of the products
    A = -theta rho (U - ratio G)    the cotangent of G
    dS = eta U, dW = (1 - alpha) u_w, dalpha = -<u_w, W>, deta = <U, S>, dtheta = -rho <U, G>

ratio is <U, G> / |G|^2 where the norm was clipped, and 0 otherwise. The part of dW that passes
through G is added later. Where the step was skipped, dS and dW are u_s and u_w, all others zero.

Then over the rows, with c, twice the loss's factor:

    p_bar = k A1^T + a1, dh_bar = p_bar * act'(z)                 a tile of the hidden layer each
    e_bar = h A2^T + a2 + dh_bar w2^T, q = w * e_bar + dloss e    a tile of the output each
    z_bar = (e A2 + q w2) * act'(z) + p_bar * dh * act''(z)       a tile of the hidden layer each
    dk = c (p A1 + z_bar w1)                                      a tile of the keys each

dv is -c q; dW gets c z_bar^T k and c (e^T dh_bar + q^T h), which kernels_gradients.py adds. The
residual r = h w2^T + b2 - v is recomputed, from operands that are loaded anyway. A step that was
skipped gives its rows zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import activated
from .tiles import (
    after_the_launch_before,
    elements_of_tile,
    exists,
    is_finite,
    load_bias,
    load_rounded,
    load_row_weights,
    part_of_program,
    product,
    product_operand,
    residual_of,
    start_of_problem,
    store_column_sums,
    store_operand,
    store_rounded,
    sum_of_partials,
    tile_of_program,
    two_products,
)


@triton.jit
def load_upstream(x_ptr, at, inside, BLOCK: tl.constexpr):
    """A block of a gradient, zeros where there is none."""
    x = tl.zeros([BLOCK], dtype=tl.float32)
    if x_ptr is not None:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    return x


@triton.jit
def inner_products(
    tensors, partials_ptr, norm_ptr, place, size, slots, ROUNDS: tl.constexpr, CONFIG: tl.constexpr
):
    """The parts of the three inner products of BLOCK elements of one tensor."""
    uw_ptr, us_ptr, w_ptr, s_ptr, g_ptr, operand_ptr = tensors
    problem, slot, first = place
    inside = first + tl.arange(0, CONFIG.BLOCK) < size
    at = problem.to(tl.int64) * size + first + tl.arange(0, CONFIG.BLOCK)
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    s = tl.load(s_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    finite = is_finite(tl.load(norm_ptr + problem))
    uw = tl.where(finite, load_upstream(uw_ptr, at, inside, CONFIG.BLOCK), 0.0)
    u = uw + tl.where(finite, load_upstream(us_ptr, at, inside, CONFIG.BLOCK), 0.0)
    partials_at = partials_ptr + 3 * problem.to(tl.int64) * slots + slot
    tl.store(partials_at, tl.sum(uw * w, 0))
    tl.store(partials_at + slots, tl.sum(u * s, 0))
    tl.store(partials_at + 2 * slots, tl.sum(u * g, 0))
    if ROUNDS:
        w = product_operand(w, operand_ptr.dtype.element_ty, CONFIG)
        tl.store(operand_ptr + at, w, mask=inside)


@triton.jit
def inner_products_kernel(
    uw1_ptr,
    ub1_ptr,
    uw2_ptr,
    ub2_ptr,
    us1_ptr,
    uc1_ptr,
    us2_ptr,
    uc2_ptr,
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
    norm_ptr,
    partials_ptr,
    operand1_ptr,
    operand2_ptr,
    width,
    hidden,
    programs,
    CONFIG: tl.constexpr,
):
    """One program takes BLOCK elements of one tensor."""
    after_the_launch_before(CONFIG)
    problem = tl.program_id(0) // programs
    slot = tl.program_id(0) % programs
    part, first = part_of_program(slot, width, hidden, CONFIG.BLOCK)
    place = problem, slot, first
    matrix = tl.cast(hidden, tl.int64) * width
    ROUNDS: tl.constexpr = CONFIG.ROUNDS
    of_w1 = uw1_ptr, us1_ptr, w1_ptr, s1_ptr, g1_ptr, operand1_ptr
    of_w2 = uw2_ptr, us2_ptr, w2_ptr, s2_ptr, g2_ptr, operand2_ptr
    of_b1 = ub1_ptr, uc1_ptr, b1_ptr, c1_ptr, d1_ptr, operand1_ptr
    of_b2 = ub2_ptr, uc2_ptr, b2_ptr, c2_ptr, d2_ptr, operand2_ptr
    if part == 0:
        inner_products(of_w1, partials_ptr, norm_ptr, place, matrix, programs, ROUNDS, CONFIG)
    elif part == 1:
        inner_products(of_w2, partials_ptr, norm_ptr, place, matrix, programs, ROUNDS, CONFIG)
    elif part == 2:
        inner_products(of_b1, partials_ptr, norm_ptr, place, hidden, programs, False, CONFIG)
    else:
        inner_products(of_b2, partials_ptr, norm_ptr, place, width, programs, False, CONFIG)


@triton.jit
def cotangents(tensors, place, size, factors, IS_OPERAND: tl.constexpr, CONFIG: tl.constexpr):
    """BLOCK elements of one tensor of A, dS and dW."""
    uw_ptr, us_ptr, g_ptr, a_ptr, ds_ptr, dw_ptr = tensors
    problem, first = place
    finite, alpha, eta, rate, ratio = factors
    inside = first + tl.arange(0, CONFIG.BLOCK) < size
    at = problem.to(tl.int64) * size + first + tl.arange(0, CONFIG.BLOCK)
    uw = load_upstream(uw_ptr, at, inside, CONFIG.BLOCK)
    us = load_upstream(us_ptr, at, inside, CONFIG.BLOCK)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    u = uw + us
    a = tl.where(finite, -rate * (u - ratio * g), 0.0)
    if IS_OPERAND:
        a = product_operand(a, a_ptr.dtype.element_ty, CONFIG)
    tl.store(a_ptr + at, a, mask=inside)
    tl.store(ds_ptr + at, tl.where(finite, eta * u, us), mask=inside)
    if dw_ptr is not None:
        tl.store(dw_ptr + at, tl.where(finite, (1.0 - alpha) * uw, uw), mask=inside)


@triton.jit
def cotangents_kernel(
    uw1_ptr,
    ub1_ptr,
    uw2_ptr,
    ub2_ptr,
    us1_ptr,
    uc1_ptr,
    us2_ptr,
    uc2_ptr,
    g1_ptr,
    d1_ptr,
    g2_ptr,
    d2_ptr,
    alpha_ptr,
    eta_ptr,
    theta_ptr,
    norm_ptr,
    partials_ptr,
    a1_ptr,
    a1_bias_ptr,
    a2_ptr,
    a2_bias_ptr,
    ds1_ptr,
    dc1_ptr,
    ds2_ptr,
    dc2_ptr,
    dw1_ptr,
    db1_ptr,
    dw2_ptr,
    db2_ptr,
    dalpha_ptr,
    deta_ptr,
    dtheta_ptr,
    max_norm,
    width,
    hidden,
    programs,
    slots,
    CONFIG: tl.constexpr,
):
    """One program takes BLOCK elements of one tensor; a problem's first one also the gates."""
    after_the_launch_before(CONFIG)
    problem = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs
    part, first = part_of_program(tile, width, hidden, CONFIG.BLOCK)
    matrix = tl.cast(hidden, tl.int64) * width
    alpha = tl.load(alpha_ptr + problem)
    eta = tl.load(eta_ptr + problem)
    theta = tl.load(theta_ptr + problem)
    norm = tl.load(norm_ptr + problem)
    finite = is_finite(norm)
    along = sum_of_partials(partials_ptr + 2 * slots, 3 * problem, slots)
    rho = 1.0
    ratio = 0.0
    if CONFIG.CLIPS:
        # Divided twice: the square of the norm may overflow or vanish.
        rho = tl.where(norm > max_norm, max_norm / norm, 1.0)
        ratio = tl.where(norm > max_norm, along / norm / norm, 0.0)
    rate = theta * rho
    if tile == 0:
        dalpha = -sum_of_partials(partials_ptr, 3 * problem, slots)
        tl.store(dalpha_ptr + problem, tl.where(finite, dalpha, 0.0))
        deta = sum_of_partials(partials_ptr + slots, 3 * problem, slots)
        tl.store(deta_ptr + problem, tl.where(finite, deta, 0.0))
        tl.store(dtheta_ptr + problem, tl.where(finite, -rho * along, 0.0))
    place, factors = (problem, first), (finite, alpha, eta, rate, ratio)
    of_w1 = uw1_ptr, us1_ptr, g1_ptr, a1_ptr, ds1_ptr, dw1_ptr
    of_w2 = uw2_ptr, us2_ptr, g2_ptr, a2_ptr, ds2_ptr, dw2_ptr
    of_b1 = ub1_ptr, uc1_ptr, d1_ptr, a1_bias_ptr, dc1_ptr, db1_ptr
    of_b2 = ub2_ptr, uc2_ptr, d2_ptr, a2_bias_ptr, dc2_ptr, db2_ptr
    if part == 0:
        cotangents(of_w1, place, matrix, factors, True, CONFIG)
    elif part == 1:
        cotangents(of_w2, place, matrix, factors, True, CONFIG)
    elif part == 2:
        cotangents(of_b1, place, hidden, factors, False, CONFIG)
    else:
        cotangents(of_b2, place, width, factors, False, CONFIG)


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
    CONFIG: tl.constexpr,
):
    """One program computes a tile of dh_bar and, unless act'' is zero, of p_bar."""
    tile = tile_of_program(rows, hidden, CONFIG)
    k_ptr += start_of_problem(tile.problem, k_inner, k_outer_stride, k_inner_stride)
    p_bar = product(k_ptr, k_row_stride, a1_ptr, tile, rows, hidden, width, True, CONFIG)
    p_bar += load_bias(a1_bias_ptr, tile, hidden)
    z = load_rounded(z_ptr, tile, rows, hidden, CONFIG)
    _, slope, _ = activated(z, CONFIG)
    finite = is_finite(tl.load(norm_ptr + tile.problem))
    if CONFIG.ACTIVATION != "relu":
        store_rounded(p_bar_ptr, p_bar, tile, rows, hidden, CONFIG)
    dh_bar = tl.where(finite, p_bar * slope, 0.0)
    store_operand(dh_bar_ptr, dh_bar_transposed_ptr, dh_bar, tile, rows, hidden, CONFIG)


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
    CONFIG: tl.constexpr,
):
    """One program computes a tile of q and of dv, the sums of q's columns, and the tile's part of
    the gradients of the row weights.
    """
    tile = tile_of_program(rows, width, CONFIG)
    WITH_R: tl.constexpr = row_weights_ptr is not None or dloss_ptr is not None
    pairs = h_ptr, a2_ptr, dh_bar_ptr, w2_ptr
    e_bar, r = two_products(pairs, tile, rows, width, hidden, WITH_R, True, CONFIG)
    inside = exists(tile, rows, width)
    e_bar += load_bias(a2_bias_ptr, tile, width)
    finite = is_finite(tl.load(norm_ptr + tile.problem))
    q = e_bar
    e = tl.zeros_like(e_bar)
    if WITH_R:
        v_at = v_ptr, v_inner, v_outer_stride, v_inner_stride, v_row_stride
        r = residual_of(r, b2_ptr, v_at, tile, inside, width, CONFIG)
        e = r
    if row_weights_ptr is not None:
        row_weights = load_row_weights(row_weights_ptr, tile, rows)
        q = row_weights * e_bar
        e = row_weights * r
        by_weight = e_bar * r
    if dloss_ptr is not None:
        dloss = tl.load(dloss_ptr + tile.problem).to(tl.float32)
        q += dloss * e
        if row_weights_ptr is not None:
            by_weight += 0.5 * dloss * r * r
    if row_weights_ptr is not None:
        by_weight = tl.where(inside, tl.where(finite, factor * by_weight, 0.0), 0.0)
        col_tiles = tl.cdiv(width, CONFIG.BLOCK_N)
        parts_at = (tile.problem.to(tl.int64) * col_tiles + tile.col_tile) * rows + tile.row
        tl.store(row_parts_ptr + parts_at, tl.sum(by_weight, 1), mask=tile.row < rows)
    q = tl.where(inside, tl.where(finite, q, 0.0), 0.0)
    store_column_sums(sums_ptr, q, tile, rows, width, CONFIG)
    if dv_ptr is not None:
        dv = (-factor * q).to(dv_ptr.dtype.element_ty)
        tl.store(elements_of_tile(dv_ptr, tile, rows, width, CONFIG), dv, mask=inside)
    store_operand(q_ptr, q_transposed_ptr, q, tile, rows, width, CONFIG)


@triton.jit
def add_row_parts(parts_ptr, out_ptr, tile, rows, row_parts, BLOCK_M: tl.constexpr):
    """The first tile of some rows adds the parts of their weights' gradients, one of each tile of
    q.
    """
    if tile.col_tile == 0:
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        start = tile.problem.to(tl.int64) * row_parts
        for part in tl.range(0, row_parts):
            part_at = parts_ptr + (start + part) * rows + tile.row
            total += tl.load(part_at, mask=tile.row < rows, other=0.0)
        tl.store(out_ptr + tile.problem.to(tl.int64) * rows + tile.row, total, mask=tile.row < rows)


@triton.jit
def z_bar_kernel(
    e_ptr,
    q_ptr,
    a2_ptr,
    w2_ptr,
    z_ptr,
    dh_ptr,
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
    CONFIG: tl.constexpr,
):
    """One program computes a tile of z_bar and the sums of its columns; the first of its rows also
    adds the parts of the row weights' gradients that the tiles of q stored. ``TRANSPOSED``: A2 and
    w2 are stored as their transposes.
    """
    tile = tile_of_program(rows, hidden, CONFIG)
    pairs = e_ptr, a2_ptr, q_ptr, w2_ptr
    h_bar, _ = two_products(pairs, tile, rows, hidden, width, False, CONFIG.TRANSPOSED, CONFIG)
    inside = exists(tile, rows, hidden)
    z = load_rounded(z_ptr, tile, rows, hidden, CONFIG)
    _, slope, curve = activated(z, CONFIG)
    z_bar = h_bar * slope
    if CONFIG.ACTIVATION != "relu":
        p_bar = load_rounded(p_bar_ptr, tile, rows, hidden, CONFIG)
        z_bar += p_bar * load_rounded(dh_ptr, tile, rows, hidden, CONFIG) * curve
    finite = is_finite(tl.load(norm_ptr + tile.problem))
    z_bar = tl.where(inside, tl.where(finite, z_bar, 0.0), 0.0)
    store_column_sums(sums_ptr, z_bar, tile, rows, hidden, CONFIG)
    store_operand(z_bar_ptr, z_bar_transposed_ptr, z_bar, tile, rows, hidden, CONFIG)
    if drow_weights_ptr is not None:
        add_row_parts(row_parts_ptr, drow_weights_ptr, tile, rows, row_parts, CONFIG.BLOCK_M)


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
    CONFIG: tl.constexpr,
):
    """One program computes a tile of dk. ``TRANSPOSED``: A1 and w1 are stored transposed."""
    tile = tile_of_program(rows, width, CONFIG)
    pairs = p_ptr, a1_ptr, z_bar_ptr, w1_ptr
    dk, _ = two_products(pairs, tile, rows, width, hidden, False, CONFIG.TRANSPOSED, CONFIG)
    inside = exists(tile, rows, width)
    finite = is_finite(tl.load(norm_ptr + tile.problem))
    dk = tl.where(finite, factor * dk, 0.0).to(dk_ptr.dtype.element_ty)
    tl.store(elements_of_tile(dk_ptr, tile, rows, width, CONFIG), dk, mask=inside)
