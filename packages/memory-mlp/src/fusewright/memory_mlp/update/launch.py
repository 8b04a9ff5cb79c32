"""The forward pass of memory_update: its tables, its plan, its launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from ..common.operands import contiguous
from .problem import (
    ANY_SIZE,
    GRADIENTS_ANY_SIZE,
    HOPPER,
    ElementConfig,
    GradientsPlan,
    UpdateBlock,
    UpdateProblem,
    UpdateTile,
    element_launch,
    element_programs,
    grid_of,
    plan_gradients,
    problem_of,
    row_product_launch,
    tile_precision,
    tiles,
    transpose_launch,
)

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor

# Each table is read from the top: the first line that fits serves. The results do not depend on it.
# Source: results/tuning-update-h200-torch2.11-triton3.6.csv for the tiles of Hopper and the blocks
# of elements. At the sizes that it serves there, a tile is at most 3 % slower than the fastest, a
# block, which serves all sizes and dtypes, 7 %. Other tiles, and those for row weights and the
# gradient of the loss, are unmeasured.
HIDDEN = (
    UpdateTile("narrow", 128, 128, 64, num_warps=8, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 128, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *ANY_SIZE,
)
RESIDUAL = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 128, 64, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 32, 64, num_warps=4, num_stages=6, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *ANY_SIZE,
)
# Row weights take more registers than those tiles leave.
WEIGHTED_RESIDUAL = HIDDEN
SLOPE = (
    UpdateTile("narrow", 128, 64, 64, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 64, 128, 32, num_warps=4, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *ANY_SIZE,
)
GRADIENTS = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=7, fills=0.8, **HOPPER),
    UpdateTile("narrow", 64, 128, 64, num_warps=4, num_stages=4, fills=0.8, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=8, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 128, 32, num_warps=8, num_stages=7, fills=0.8, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.2, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=8, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=3),
    *GRADIENTS_ANY_SIZE,
)
ROUND = UpdateBlock(block=512, num_warps=4)
STEP = UpdateBlock(block=512, num_warps=4)


class UpdatePlan(NamedTuple):
    """One forward pass: its launches in their order, which of k and v it copies first, and the
    allocators of its tensors: z, h, e and p of all rows, the partial sums, the rounded weights, the
    operands of TF32 products (k rounded, then transposes of k, h, e, p and w2), and the tensors of
    a MemoryWeights, for the gradient, W' and S'.
    """

    rounds: Launch | None
    transposes: Launch | None
    hidden: Launch
    residual: Launch
    slope: Launch
    gradients: GradientsPlan
    step: Launch
    copies: tuple[bool, bool]
    rows: tuple[Allocator, ...]
    partials: tuple[Allocator, ...]
    operands: tuple[Allocator, Allocator] | None
    transposed: tuple[Allocator | None, ...]
    weights: tuple[Allocator, ...]
    number: Allocator
    flag: Allocator


def update_forward(
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
            return update_forward(
                k, v, w1, b1, w2, b2, s1, c1, s2, c2, alpha, eta, theta, row_weights, factor,
                activation, max_grad_norm,
            )  # fmt: skip
    plan = update_plan(
        k.shape,
        w1.shape[-2],
        layouts(k, v),
        row_weights is not None,
        activation,
        max_grad_norm is not None,
        tile_precision(k.dtype),
        k.device,
    )
    if any(plan.copies):
        k, v = contiguous_where((k, v), plan.copies)
    w1, b1, w2, b2, s1, c1, s2, c2 = map(contiguous, (w1, b1, w2, b2, s1, c1, s2, c2))
    gates = contiguous(alpha), contiguous(eta), contiguous(theta)
    z, h, e, p = (allocator() for allocator in plan.rows)
    e_sums, p_sums, losses, squares = (allocator() for allocator in plan.partials)
    gradient = [allocator() for allocator in plan.weights]
    new_weights = [allocator() for allocator in plan.weights]
    new_momentum = [allocator() for allocator in plan.weights]
    loss, norm, skipped = plan.number(), plan.number(), plan.flag()
    w1_operand, w2_operand = w1, w2
    if plan.operands is not None:
        w1_operand, w2_operand = plan.operands[0](), plan.operands[1]()
    if plan.rounds is not None:
        plan.rounds((w1, w2, w1_operand, w2_operand))
    k_operand, k_transposed, *transposed = map(allocate, plan.transposed)
    h_transposed, e_transposed, p_transposed, w2_transposed = transposed
    if plan.transposes is not None:
        absent = None, None, None, None
        weights_out = w1_operand, None, w2_operand, w2_transposed
        plan.transposes((k, w1, w2, *absent, k_operand, k_transposed, *weights_out, *absent))
        operands = p_transposed, k_transposed, e_transposed, h_transposed, None, None
    else:
        operands = p, k, e, h, None, None
        k_operand, w2_transposed = k, w2_operand
    plan.hidden((k_operand, w1_operand, b1, z, h, h_transposed))
    plan.residual((h, w2_operand, b2, v, contiguous(row_weights), e, e_transposed, e_sums, losses))
    plan.slope((e, w2_transposed, z, p, p_transposed, p_sums))
    plan.gradients.run(operands, (p_sums, e_sums), None, gradient, squares, factor)
    plan.step(
        (
            *(w1, b1, w2, b2, s1, c1, s2, c2, *gradient),
            *(*gates, squares, losses, *new_weights, *new_momentum, loss, norm, skipped),
        ),
        (0.5 * factor, max_grad_norm or 0.0),
    )
    return *new_weights, *new_momentum, loss, norm, skipped, z, h, e, p, *gradient


@functools.lru_cache(maxsize=4096)
def update_plan(
    shape: tuple[int, ...],
    units: int,
    operands: tuple[Layout, Layout],
    has_row_weights: bool,
    activation: str,
    clips: bool,
    precision: str,
    device: torch.device,
) -> UpdatePlan:
    """The plan for k and v of these layouts and a memory of ``units`` hidden units."""
    problem = problem_of(shape, units, *operands, activation, precision, device)
    rows, width, hidden = problem.sizes
    first = problem.tile(HIDDEN, hidden)
    residual = problem.tile(WEIGHTED_RESIDUAL if has_row_weights else RESIDUAL, width)
    slope = problem.tile(SLOPE, hidden)
    residual_tiles, slope_tiles = tiles(rows, residual), tiles(rows, slope)
    loss_tiles = residual_tiles * cdiv(width, residual.cols)
    gradients = plan_gradients(problem, GRADIENTS, (slope_tiles, residual_tiles))
    return UpdatePlan(
        round_launch(problem) if problem.rounds and not problem.transposes else None,
        transpose_launch(problem, backward=False) if problem.transposes else None,
        row_product_launch(
            kernels.hidden_kernel,
            problem,
            first,
            hidden,
            width,
            (*problem.key_operands, *problem.sizes),
        ),
        row_product_launch(
            kernels.residual_kernel,
            problem,
            residual,
            width,
            hidden,
            (*problem.values, *problem.sizes),
        ),
        row_product_launch(kernels.slope_kernel, problem, slope, hidden, width, problem.sizes),
        gradients,
        element_launch(
            kernels.step_kernel,
            problem,
            STEP,
            (width, hidden, element_programs(problem, STEP.block), gradients.slots, loss_tiles),
            clips=clips,
        ),
        problem.copies,
        rows=(
            problem.allocator(rows, hidden),
            problem.operand(rows, hidden),
            problem.operand(rows, width),
            problem.operand(rows, hidden),
        ),
        partials=(
            problem.allocator(residual_tiles, width),
            problem.allocator(slope_tiles, hidden),
            problem.allocator(loss_tiles),
            problem.allocator(gradients.slots),
        ),
        operands=problem.weight_operands() if problem.rounds else None,
        transposed=(
            problem.operand(rows, width) if problem.transposes else None,
            problem.transposed_rows(width),
            problem.transposed_rows(hidden),
            problem.transposed_rows(width),
            problem.transposed_rows(hidden),
            problem.operand(hidden, width) if problem.transposes else None,
        ),
        weights=problem.weights(),
        number=problem.allocator(),
        flag=problem.allocator(dtype=torch.bool),
    )


def round_launch(problem: UpdateProblem) -> Launch:
    """Both weights of all memories, as narrow products take them."""
    elements = problem.problems * problem.hidden * problem.width
    return Launch(
        kernels.round_weights_kernel,
        grid_of(cdiv(elements, ROUND.block)),
        problem.device,
        (elements,),
        dict(num_warps=ROUND.num_warps),
        CONFIG=ElementConfig(ROUND.block, interpreted(), problem.precision),
    )
