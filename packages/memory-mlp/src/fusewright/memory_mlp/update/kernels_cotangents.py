"""Triton kernels of the pooled update, backward, over the elements of weights and momentum.

Of the gradients u_w of W' and u_s of S', with U = u_w + u_s:

    <u_w, W>, <U, S>, <U, G>        and the weights as operands of the products
    A = -theta rho (U - ratio G)    the cotangent of G
    dS = eta U, dW = (1 - alpha) u_w, dalpha = -<u_w, W>, deta = <U, S>, dtheta = -rho <U, G>

ratio is <U, G> / |G|^2 where the norm was clipped, and 0 otherwise. The part of dW that passes
through G is added later. Where the step was skipped, dS and dW are u_s and u_w, all others zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    after_the_launch_before,
    is_finite,
    part_of_program,
    product_operand,
    sum_of_partials,
)


@triton.jit
def load_upstream(x_ptr, at, inside, HAS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a gradient, zeros where there is none."""
    x = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    return x


@triton.jit
def inner_products(
    uw_ptr,
    us_ptr,
    w_ptr,
    s_ptr,
    g_ptr,
    operand_ptr,
    partials_ptr,
    norm_ptr,
    problem,
    first,
    size,
    slot,
    slots,
    HAS_UW: tl.constexpr,
    HAS_US: tl.constexpr,
    ROUNDS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of the three inner products of BLOCK elements of one tensor."""
    inside = first + tl.arange(0, BLOCK) < size
    at = problem.to(tl.int64) * size + first + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    s = tl.load(s_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    finite = is_finite(tl.load(norm_ptr + problem))
    uw = tl.where(finite, load_upstream(uw_ptr, at, inside, HAS_UW, BLOCK), 0.0)
    u = uw + tl.where(finite, load_upstream(us_ptr, at, inside, HAS_US, BLOCK), 0.0)
    partials_at = partials_ptr + 3 * problem.to(tl.int64) * slots + slot
    tl.store(partials_at, tl.sum(uw * w, 0))
    tl.store(partials_at + slots, tl.sum(u * s, 0))
    tl.store(partials_at + 2 * slots, tl.sum(u * g, 0))
    if ROUNDS:
        w = product_operand(w, operand_ptr.dtype.element_ty, UPCAST, PRECISION)
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
    HAS_UW: tl.constexpr,
    HAS_US: tl.constexpr,
    ROUNDS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program takes BLOCK elements of one tensor."""
    after_the_launch_before(OVERLAPS)
    problem = tl.program_id(0) // programs
    slot = tl.program_id(0) % programs
    part, first = part_of_program(slot, width, hidden, BLOCK)
    matrix = tl.cast(hidden, tl.int64) * width
    if part == 0:
        inner_products(
            uw1_ptr,
            us1_ptr,
            w1_ptr,
            s1_ptr,
            g1_ptr,
            operand1_ptr,
            partials_ptr,
            norm_ptr,
            problem,
            first,
            matrix,
            slot,
            programs,
            HAS_UW,
            HAS_US,
            ROUNDS,
            UPCAST,
            PRECISION,
            BLOCK,
        )
    elif part == 1:
        inner_products(
            uw2_ptr,
            us2_ptr,
            w2_ptr,
            s2_ptr,
            g2_ptr,
            operand2_ptr,
            partials_ptr,
            norm_ptr,
            problem,
            first,
            matrix,
            slot,
            programs,
            HAS_UW,
            HAS_US,
            ROUNDS,
            UPCAST,
            PRECISION,
            BLOCK,
        )
    elif part == 2:
        inner_products(
            ub1_ptr,
            uc1_ptr,
            b1_ptr,
            c1_ptr,
            d1_ptr,
            operand1_ptr,
            partials_ptr,
            norm_ptr,
            problem,
            first,
            hidden,
            slot,
            programs,
            HAS_UW,
            HAS_US,
            False,
            UPCAST,
            PRECISION,
            BLOCK,
        )
    else:
        inner_products(
            ub2_ptr,
            uc2_ptr,
            b2_ptr,
            c2_ptr,
            d2_ptr,
            operand2_ptr,
            partials_ptr,
            norm_ptr,
            problem,
            first,
            width,
            slot,
            programs,
            HAS_UW,
            HAS_US,
            False,
            UPCAST,
            PRECISION,
            BLOCK,
        )


@triton.jit
def cotangents(
    uw_ptr,
    us_ptr,
    g_ptr,
    a_ptr,
    ds_ptr,
    dw_ptr,
    problem,
    first,
    size,
    finite,
    alpha,
    eta,
    rate,
    ratio,
    HAS_UW: tl.constexpr,
    HAS_US: tl.constexpr,
    WITH_WEIGHTS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one tensor of A, dS and dW."""
    inside = first + tl.arange(0, BLOCK) < size
    at = problem.to(tl.int64) * size + first + tl.arange(0, BLOCK)
    uw = load_upstream(uw_ptr, at, inside, HAS_UW, BLOCK)
    us = load_upstream(us_ptr, at, inside, HAS_US, BLOCK)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    u = uw + us
    a = tl.where(finite, -rate * (u - ratio * g), 0.0)
    tl.store(a_ptr + at, product_operand(a, a_ptr.dtype.element_ty, UPCAST, PRECISION), mask=inside)
    tl.store(ds_ptr + at, tl.where(finite, eta * u, us), mask=inside)
    if WITH_WEIGHTS:
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
    HAS_UW: tl.constexpr,
    HAS_US: tl.constexpr,
    WITH_WEIGHTS: tl.constexpr,
    CLIPS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program takes BLOCK elements of one tensor; a problem's first one also the gates."""
    after_the_launch_before(OVERLAPS)
    problem = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs
    part, first = part_of_program(tile, width, hidden, BLOCK)
    matrix = tl.cast(hidden, tl.int64) * width
    alpha = tl.load(alpha_ptr + problem)
    eta = tl.load(eta_ptr + problem)
    theta = tl.load(theta_ptr + problem)
    norm = tl.load(norm_ptr + problem)
    finite = is_finite(norm)
    along = sum_of_partials(partials_ptr + 2 * slots, 3 * problem, slots)
    rho = 1.0
    ratio = 0.0
    if CLIPS:
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
    if part == 0:
        cotangents(
            uw1_ptr,
            us1_ptr,
            g1_ptr,
            a1_ptr,
            ds1_ptr,
            dw1_ptr,
            problem,
            first,
            matrix,
            finite,
            alpha,
            eta,
            rate,
            ratio,
            HAS_UW,
            HAS_US,
            WITH_WEIGHTS,
            UPCAST,
            PRECISION,
            BLOCK,
        )
    elif part == 1:
        cotangents(
            uw2_ptr,
            us2_ptr,
            g2_ptr,
            a2_ptr,
            ds2_ptr,
            dw2_ptr,
            problem,
            first,
            matrix,
            finite,
            alpha,
            eta,
            rate,
            ratio,
            HAS_UW,
            HAS_US,
            WITH_WEIGHTS,
            UPCAST,
            PRECISION,
            BLOCK,
        )
    elif part == 2:
        cotangents(
            ub1_ptr,
            uc1_ptr,
            d1_ptr,
            a1_bias_ptr,
            dc1_ptr,
            db1_ptr,
            problem,
            first,
            hidden,
            finite,
            alpha,
            eta,
            rate,
            ratio,
            HAS_UW,
            HAS_US,
            WITH_WEIGHTS,
            UPCAST,
            "ieee",
            BLOCK,
        )
    else:
        cotangents(
            ub2_ptr,
            uc2_ptr,
            d2_ptr,
            a2_bias_ptr,
            dc2_ptr,
            db2_ptr,
            problem,
            first,
            width,
            finite,
            alpha,
            eta,
            rate,
            ratio,
            HAS_UW,
            HAS_US,
            WITH_WEIGHTS,
            UPCAST,
            "ieee",
            BLOCK,
        )
