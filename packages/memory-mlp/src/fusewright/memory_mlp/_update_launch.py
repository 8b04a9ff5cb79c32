"""The forward pass of the pooled update: plans its launches, allocates and launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ._backends import interpreted
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made
from ._update_configs import (
    GRADIENTS,
    HIDDEN,
    RESIDUAL,
    ROUND,
    SLOPE,
    STEP,
    TURN,
    WEIGHTED_RESIDUAL,
)
from ._update_gradients import GradientsPlan, plan_gradients
from ._update_kernels import (
    _hidden_kernel,
    _residual_kernel,
    _round_weights_kernel,
    _slope_kernel,
    _step_kernel,
)
from ._update_problem import (
    UpdateProblem,
    element_launch,
    element_programs,
    grid_of,
    in_line,
    precision_of,
    problem_of,
    row_product_launch,
    tiles,
)
from ._update_turn_kernels import _turn_kernel

Tensor = torch.Tensor


class UpdatePlan(NamedTuple):
    """One forward pass: its launches in their order, which of k and v it copies first, and its
    memory: z, h, e and p of every row, the partial sums, the rounded weights, what TF32 products
    read turned (k, h, e, p and w2; k rounded as it lies before them), and three times what a
    MemoryWeights takes, for the gradient, W' and S'.
    """

    rounds: Launch | None
    turns: Launch | None
    hidden: Launch
    residual: Launch
    slope: Launch
    gradients: GradientsPlan
    step: Launch
    copies: tuple[bool, bool]
    rows: tuple[Allocate, ...]
    partials: tuple[Allocate, ...]
    operands: tuple[Allocate, Allocate] | None
    turned: tuple[Allocate | None, ...]
    weights: tuple[Allocate, ...]
    number: Allocate
    flag: Allocate


def launch_memory_update(
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    s1: Tensor,
    c1: Tensor,
    s2: Tensor,
    c2: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    row_weights: Tensor | None,
    factor: float,
    activation: str,
    max_grad_norm: float | None,
) -> tuple[Tensor, ...]:
    """One step of the memory (w1, b1, w2, b2) with the momentum (s1, c1, s2, c2).

    Returns:
        W' and S', four tensors each; loss, norm, skipped; z in fp32 and h, e, p in k's dtype, e and
        p without ``factor``; the gradient, four tensors.
    """
    if not is_current(k.device):
        with torch.cuda.device(k.device):
            return launch_memory_update(
                k, v, w1, b1, w2, b2, s1, c1, s2, c2, alpha, eta, theta, row_weights, factor,
                activation, max_grad_norm,
            )  # fmt: skip
    plan = update_plan(
        k.shape,
        w1.shape[-2],
        kinds(k, v),
        row_weights is not None,
        activation,
        max_grad_norm is not None,
        precision_of(k.dtype),
        k.device,
    )
    if any(plan.copies):
        k, v = copied((k, v), plan.copies)
    w1, b1, w2, b2, s1, c1, s2, c2 = map(in_line, (w1, b1, w2, b2, s1, c1, s2, c2))
    gates = in_line(alpha), in_line(eta), in_line(theta)
    z, h, e, p = (allocate() for allocate in plan.rows)
    e_sums, p_sums, losses, squares = (allocate() for allocate in plan.partials)
    gradient = [allocate() for allocate in plan.weights]
    written = [allocate() for allocate in plan.weights]
    moved = [allocate() for allocate in plan.weights]
    loss, norm, skipped = plan.number(), plan.number(), plan.flag()
    w1_operand, w2_operand = w1, w2
    if plan.operands is not None:
        w1_operand, w2_operand = plan.operands[0](), plan.operands[1]()
    if plan.rounds is not None:
        plan.rounds((w1, w2, w1_operand, w2_operand))
    k_operand, k_turned, h_turned, e_turned, p_turned, w2_turned = map(made, plan.turned)
    if plan.turns is not None:
        nothing = None, None, None, None
        weights_out = w1_operand, None, w2_operand, w2_turned
        plan.turns((k, w1, w2, *nothing, k_operand, k_turned, *weights_out, *nothing))
        operands = p_turned, k_turned, e_turned, h_turned, None, None
    else:
        operands = p, k, e, h, None, None
        k_operand, w2_turned = k, w2_operand
    plan.hidden((k_operand, w1_operand, b1, z, h, h_turned))
    plan.residual((h, w2_operand, b2, v, in_line(row_weights), e, e_turned, e_sums, losses))
    plan.slope((e, w2_turned, z, p, p_turned, p_sums))
    plan.gradients.run(operands, (p_sums, e_sums), None, gradient, squares, factor)
    plan.step(
        (
            *(w1, b1, w2, b2, s1, c1, s2, c2, *gradient),
            *(*gates, squares, losses, *written, *moved, loss, norm, skipped),
        ),
        (0.5 * factor, max_grad_norm or 0.0),
    )
    return *written, *moved, loss, norm, skipped, z, h, e, p, *gradient


@functools.lru_cache(maxsize=4096)
def update_plan(
    shape: tuple[int, ...],
    units: int,
    operands: tuple[Kind, Kind],
    has_row_weights: bool,
    activation: str,
    clips: bool,
    precision: str,
    device: torch.device,
) -> UpdatePlan:
    """The plan for k and v of these kinds and a memory of so many hidden units."""
    problem = problem_of(shape, units, *operands, activation, precision, device)
    rows, width, hidden = problem.sizes
    first = problem.tile(HIDDEN, hidden)
    residual = problem.tile(WEIGHTED_RESIDUAL if has_row_weights else RESIDUAL, width)
    slope = problem.tile(SLOPE, hidden)
    residual_tiles, slope_tiles = tiles(rows, residual), tiles(rows, slope)
    loss_tiles = residual_tiles * triton.cdiv(width, residual.cols)
    gradients = plan_gradients(problem, GRADIENTS, (slope_tiles, residual_tiles), backward=False)
    return UpdatePlan(
        round_launch(problem) if problem.rounds and not problem.turns else None,
        turn_launch(problem, backward=False) if problem.turns else None,
        row_product_launch(
            _hidden_kernel,
            problem,
            first,
            hidden,
            width,
            (*problem.key_operands, *problem.sizes),
            ACTIVATION=activation,
        ),
        row_product_launch(
            _residual_kernel,
            problem,
            residual,
            width,
            hidden,
            (*problem.values, *problem.sizes),
            HAS_ROW_WEIGHTS=has_row_weights,
        ),
        row_product_launch(
            _slope_kernel,
            problem,
            slope,
            hidden,
            width,
            problem.sizes,
            ACTIVATION=activation,
            TURNED=problem.turns,
        ),
        gradients,
        element_launch(
            _step_kernel,
            problem,
            STEP,
            (width, hidden, element_programs(problem, STEP.block), gradients.slots, loss_tiles),
            CLIPS=clips,
        ),
        problem.copies,
        rows=(
            problem.memory(rows, hidden),
            problem.operand(rows, hidden),
            problem.operand(rows, width),
            problem.operand(rows, hidden),
        ),
        partials=(
            problem.memory(residual_tiles, width),
            problem.memory(slope_tiles, hidden),
            problem.memory(loss_tiles),
            problem.memory(gradients.slots),
        ),
        operands=operand_memory(problem) if problem.rounds else None,
        turned=(
            problem.operand(rows, width) if problem.turns else None,
            problem.turned_rows(width),
            problem.turned_rows(hidden),
            problem.turned_rows(width),
            problem.turned_rows(hidden),
            problem.operand(hidden, width) if problem.turns else None,
        ),
        weights=problem.weights(),
        number=problem.memory(),
        flag=problem.memory(dtype=torch.bool),
    )


def round_launch(problem: UpdateProblem) -> Launch:
    """Both weights of all memories, as narrow products take them."""
    elements = problem.problems * problem.hidden * problem.width
    return Launch(
        _round_weights_kernel,
        grid_of(triton.cdiv(elements, ROUND.block)),
        problem.device,
        (elements,),
        dict(num_warps=ROUND.num_warps),
        UPCAST=interpreted(),
        BLOCK=ROUND.block,
    )


def turn_launch(problem: UpdateProblem, backward: bool) -> Launch:
    """What TF32 products read that no launch of the pass writes as they take it."""
    rows, width, hidden = (triton.cdiv(size, TURN.block) for size in problem.sizes)
    weights, keys, units = hidden * width, rows * width, rows * hidden
    programs = 4 * weights + 2 * keys + units if backward else 2 * weights + keys
    overlaps = problem.overlaps and backward
    return Launch(
        _turn_kernel,
        grid_of(problem.problems * programs),
        problem.device,
        (*problem.keys, *problem.sizes, programs),
        problem.options(TURN.num_warps, overlaps),
        BACKWARD=backward,
        OVERLAPS=overlaps,
        BLOCK=TURN.block,
    )


def operand_memory(problem: UpdateProblem) -> tuple[Allocate, Allocate]:
    """Of w1 and w2, or what is as large, in the dtype of the products."""
    width, hidden = problem.width, problem.hidden
    return problem.operand(hidden, width), problem.operand(width, hidden)
