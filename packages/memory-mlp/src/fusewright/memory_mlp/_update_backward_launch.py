"""The backward pass of the pooled update: plans its launches, allocates and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from ._backends import interpreted
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made
from ._update_backward_kernels import _dk_kernel, _e_bar_kernel, _p_bar_kernel, _z_bar_kernel
from ._update_configs import (
    COTANGENTS,
    DK,
    DWEIGHTS,
    E_BAR,
    E_BAR_AND_R,
    INNER_PRODUCTS,
    P_BAR,
    Z_BAR,
)
from ._update_cotangent_kernels import _cotangents_kernel, _inner_products_kernel
from ._update_gradients import GradientsPlan, plan_gradients
from ._update_launch import operand_memory, turn_launch
from ._update_problem import (
    UpdateProblem,
    element_launch,
    element_programs,
    in_line,
    precision_of,
    problem_of,
    row_product_launch,
    tiles,
)

Tensor = torch.Tensor


class Asked(NamedTuple):
    """Which gradients came (of W', of S', of the loss), whether there are row weights, and which
    gradients are wanted (of k and v; of W).
    """

    from_weights: bool
    from_momentum: bool
    from_loss: bool
    row_weights: bool
    rows: bool
    weights: bool


class UpdateBackwardPlan(NamedTuple):
    """One backward pass: its launches in their order, which of k and v it copies first, and its
    memory.
    """

    inner_products: Launch
    cotangents: Launch
    turns: Launch | None
    p_bar: Launch
    e_bar: Launch
    z_bar: Launch
    dk: Launch | None
    gradients: GradientsPlan | None
    copies: tuple[bool, bool]
    rounds: bool
    operands: tuple[Allocate, Allocate]
    turned: tuple[Allocate | None, ...]
    biases: tuple[Allocate, Allocate]
    partials: tuple[Allocate, ...]
    p_bar_rows: Allocate | None
    rows: tuple[Allocate, ...]
    drows: tuple[Allocate, Allocate] | None
    row_parts: Allocate | None
    drow_weights: Allocate | None
    weights: tuple[Allocate, ...]
    number: Allocate


def launch_memory_update_backward(
    upstream: Sequence[Tensor | None],
    dloss: Tensor | None,
    k: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    gates: Sequence[Tensor],
    row_weights: Tensor | None,
    norm: Tensor,
    rows: Sequence[Tensor],
    gradient: Sequence[Tensor],
    factor: float,
    activation: str,
    max_grad_norm: float | None,
    with_rows: bool,
    with_weights: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of all floating inputs of ``launch_memory_update``.

    Args:
        upstream: those of W', then those of S', None where none came.
        dloss: that of the loss.
        weights, momentum, gates, row_weights: what the forward pass got.
        norm, rows, gradient: what it returned; rows are z, h, e and p.
        with_rows, with_weights: whether the gradients of k and v, and of W, are wanted.

    Returns:
        Those of k, v, W (four), S (four), alpha, eta, theta, row_weights; None where not wanted.
    """
    if not is_current(k.device):
        with torch.cuda.device(k.device):
            return launch_memory_update_backward(
                upstream, dloss, k, v, weights, momentum, gates, row_weights, norm, rows,
                gradient, factor, activation, max_grad_norm, with_rows, with_weights,
            )  # fmt: skip
    uw, us = whole(upstream[:4], weights), whole(upstream[4:], weights)
    w1, b1, w2, b2 = (in_line(x) for x in weights)
    plan = backward_plan(
        k.shape,
        w1.shape[-2],
        kinds(k, v),
        Asked(
            uw[0] is not None,
            us[0] is not None,
            dloss is not None,
            row_weights is not None,
            with_rows,
            with_weights,
        ),
        activation,
        max_grad_norm is not None,
        precision_of(k.dtype),
        k.device,
    )
    if any(plan.copies):
        k, v = copied((k, v), plan.copies)
    row_weights = in_line(row_weights)
    z, h, e, p = rows
    partials, q_sums, z_bar_sums = (allocate() for allocate in plan.partials)
    w1_operand, w2_operand = w1, w2
    if plan.rounds:
        w1_operand, w2_operand = plan.operands[0](), plan.operands[1]()
    a1, a2 = (allocate() for allocate in plan.operands)
    a1_bias, a2_bias = (allocate() for allocate in plan.biases)
    ds = [allocate() for allocate in plan.weights]
    dw = [allocate() if with_weights else None for allocate in plan.weights]
    dgates = [plan.number() for _ in range(3)]
    dh_bar, q, z_bar = (allocate() for allocate in plan.rows)
    p_bar, row_parts = made(plan.p_bar_rows), made(plan.row_parts)
    drow_weights = made(plan.drow_weights)
    dk, dv = (None, None) if plan.drows is None else (plan.drows[0](), plan.drows[1]())

    state = (w1, b1, w2, b2, *map(in_line, momentum))
    plan.inner_products((*uw, *us, *state, *gradient, norm, partials, w1_operand, w2_operand))
    plan.cotangents(
        (
            *(*uw, *us, *gradient, *map(in_line, gates), norm, partials),
            *(a1, a1_bias, a2, a2_bias, *ds, *dw, *dgates),
        ),
        (max_grad_norm or 0.0,),
    )
    turned = [made(allocate) for allocate in plan.turned]
    k_operand, k_turned, e_turned, h_turned, a1_turned, a2_turned, w1_turned, w2_turned = turned[:8]
    dh_bar_turned, q_turned, z_bar_turned = turned[8:]
    if plan.turns is not None:
        weights_out = None, w1_turned, None, w2_turned
        plan.turns(
            (
                *(k, w1, w2, e, h, a1, a2, k_operand, k_turned, *weights_out),
                *(e_turned, h_turned, a1_turned, a2_turned),
            )
        )
        products = z_bar_turned, k_turned, e_turned, dh_bar_turned, q_turned, h_turned
    else:
        products = z_bar, k, e, dh_bar, q, h
        k_operand, a1_turned, a2_turned = k, a1, a2
        w1_turned, w2_turned = w1_operand, w2_operand
    plan.p_bar((k_operand, a1, a1_bias, z, norm, p_bar, dh_bar, dh_bar_turned))
    plan.e_bar(
        (
            *(h, dh_bar, a2, a2_bias, w2_operand, b2, v, row_weights, in_line(dloss), norm),
            *(q, q_turned, dv, q_sums, row_parts),
        ),
        (factor,),
    )
    plan.z_bar(
        (
            *(e, q, a2_turned, w2_turned, z, p_bar, norm, row_parts),
            *(z_bar, z_bar_turned, z_bar_sums, drow_weights),
        )
    )
    if plan.dk is not None:
        plan.dk((p, z_bar, a1_turned, w1_turned, norm, dk), (factor,))
    if plan.gradients is not None:
        plan.gradients.run(products, (z_bar_sums, q_sums), norm, dw, None, factor)
    return dk, dv, *dw, *ds, *dgates, drow_weights


def whole(
    upstream: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Four gradients or none: zeros for those of four that have not come."""
    if all(x is None for x in upstream):
        return (None,) * 4
    return tuple(
        torch.zeros_like(w, memory_format=torch.contiguous_format) if x is None else in_line(x)
        for x, w in zip(upstream, weights, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    units: int,
    kinds_of_rows: tuple[Kind, Kind],
    asked: Asked,
    activation: str,
    clips: bool,
    precision: str,
    device: torch.device,
) -> UpdateBackwardPlan:
    """The plan for k and v of these kinds and a memory of so many hidden units."""
    problem = problem_of(shape, units, *kinds_of_rows, activation, precision, device)
    rows, width, hidden = problem.sizes
    with_r = asked.row_weights or asked.from_loss
    e_bar = problem.tile(E_BAR_AND_R if with_r else E_BAR, width)
    z_bar = problem.tile(Z_BAR, hidden)
    q_tiles, z_bar_tiles = tiles(rows, e_bar), tiles(rows, z_bar)
    row_parts = triton.cdiv(width, e_bar.cols)
    partials = element_programs(problem, INNER_PRODUCTS.block)
    came = dict(HAS_UW=asked.from_weights, HAS_US=asked.from_momentum)
    return UpdateBackwardPlan(
        element_launch(
            _inner_products_kernel,
            problem,
            INNER_PRODUCTS,
            (width, hidden, partials),
            first=True,
            **came,
            ROUNDS=problem.rounds,
            UPCAST=interpreted(),
            PRECISION=precision,
        ),
        element_launch(
            _cotangents_kernel,
            problem,
            COTANGENTS,
            (width, hidden, element_programs(problem, COTANGENTS.block), partials),
            **came,
            WITH_WEIGHTS=asked.weights,
            CLIPS=clips,
            UPCAST=interpreted(),
            PRECISION=precision,
        ),
        turn_launch(problem, backward=True) if problem.turns else None,
        row_product_launch(
            _p_bar_kernel,
            problem,
            problem.tile(P_BAR, hidden),
            hidden,
            width,
            (*problem.key_operands, *problem.sizes),
            ACTIVATION=activation,
        ),
        row_product_launch(
            _e_bar_kernel,
            problem,
            e_bar,
            width,
            hidden,
            (*problem.values, *problem.sizes),
            HAS_ROW_WEIGHTS=asked.row_weights,
            HAS_DLOSS=asked.from_loss,
            WITH_ROWS=asked.rows,
        ),
        row_product_launch(
            _z_bar_kernel,
            problem,
            z_bar,
            hidden,
            width,
            (*problem.sizes, row_parts),
            ACTIVATION=activation,
            HAS_ROW_WEIGHTS=asked.row_weights,
            TURNED=problem.turns,
        ),
        row_product_launch(
            _dk_kernel,
            problem,
            problem.tile(DK, width),
            width,
            hidden,
            problem.sizes,
            TURNED=problem.turns,
        )
        if asked.rows
        else None,
        plan_gradients(problem, DWEIGHTS, (z_bar_tiles, q_tiles), backward=True)
        if asked.weights
        else None,
        problem.copies,
        problem.rounds,
        operands=operand_memory(problem),
        turned=turned_memory(problem),
        biases=(problem.memory(hidden), problem.memory(width)),
        partials=(
            problem.memory(3, partials),
            problem.memory(q_tiles, width),
            problem.memory(z_bar_tiles, hidden),
        ),
        p_bar_rows=problem.memory(rows, hidden) if activation != "relu" else None,
        rows=(
            problem.operand(rows, hidden),
            problem.operand(rows, width),
            problem.operand(rows, hidden),
        ),
        drows=(problem.operand(rows, width), problem.operand(rows, width)) if asked.rows else None,
        row_parts=problem.memory(row_parts, rows) if asked.row_weights else None,
        drow_weights=problem.memory(rows) if asked.row_weights else None,
        weights=problem.weights(),
        number=problem.memory(),
    )


def turned_memory(problem: UpdateProblem) -> tuple[Allocate | None, ...]:
    """Of k as the products take it, then, turned, of k, e, h, A1, A2, w1, w2, dh_bar, q and
    z_bar.
    """
    if not problem.turns:
        return (None,) * 11
    rows, width, hidden = problem.sizes
    by_width, by_hidden = problem.turned_rows(width), problem.turned_rows(hidden)
    turned1, turned2 = problem.operand(width, hidden), problem.operand(hidden, width)
    weights = turned1, turned2, turned1, turned2
    keys = problem.operand(rows, width)
    return keys, by_width, by_width, by_hidden, *weights, by_hidden, by_width, by_hidden
