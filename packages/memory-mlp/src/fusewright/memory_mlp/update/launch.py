"""The forward pass of memory_update: its tables, its plan, its launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    cdiv,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.product_hopper import in_bulk
from . import launch_hopper
from .launch_hopper import RowsLaunch
from .problem import (
    ANY_SIZE,
    GRADIENTS_ANY_SIZE,
    HOPPER,
    ElementConfig,
    GradientsPlan,
    UpdateBlock,
    UpdateProblem,
    UpdateTile,
    grid_of,
    plan_gradients,
    problem_of,
    tile_precision,
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
    """One forward pass: its launches in their order, whether they read k and v by descriptors,
    which inputs it copies first, and the allocators of its tensors: results, partial sums, and
    operands of products that it writes, w1 and w2 rounded and of TF32 products k rounded and
    transposes of k, h, e, p and w2.
    """

    rounds: Launch | None
    transposes: Launch | None
    hidden: Launch | RowsLaunch
    residual: Launch | RowsLaunch
    slope: Launch | RowsLaunch
    gradients: GradientsPlan
    step: Launch
    describes: bool
    copies: tuple[bool, ...]
    results: tuple[Allocator, ...]
    partials: tuple[Allocator, ...]
    operands: tuple[Allocator | None, ...]


def update_forward(
    inputs: tuple[Any, ...], factor: float, activation: str, max_grad_norm: float | None
) -> tuple[Tensor, ...]:
    """One step of a memory.

    Args:
        inputs: k, v, the memory (w1, b1, w2, b2), its momentum (s1, c1, s2, c2), alpha, eta, theta,
            row weights or None.
        factor: twice that of the sum of the residuals' squares in the loss.
        activation, max_grad_norm: options of the update.

    Returns:
        W' and S', four tensors each; loss, norm, skipped; z, h, e, dh and p in k's dtype, the last
        three without ``factor``; the gradient, four tensors.
    """
    k, _, w1, *_ = inputs
    precision, clips = tile_precision(k.dtype), max_grad_norm is not None
    options = layouts(*inputs), activation, clips, precision, k.device
    plan = update_plan(k.shape, w1.shape[-2], *options)
    if plan.copies:
        inputs = contiguous_where(inputs, plan.copies)
    k, v, *state, alpha, eta, theta, row_weights = inputs
    if plan.describes:
        k, v = in_bulk(k), in_bulk(v)
    w1, b1, w2, b2, *_ = state
    results = tuple([make() for make in plan.results])
    loss, norm, skipped, z, h, e, dh, p = results[8:16]
    gradient = results[16:]
    e_sums, p_sums, losses, squares = [make() for make in plan.partials]
    operands = [allocate(operand) for operand in plan.operands]
    w1_operand, w2_operand, k_operand, k_transposed, *transposed = operands
    h_transposed, e_transposed, p_transposed, w2_transposed = transposed
    if plan.transposes is not None:
        absent = None, None, None, None
        weights_out = w1_operand, None, w2_operand, w2_transposed
        plan.transposes((k, w1, w2, *absent, k_operand, k_transposed, *weights_out, *absent))
        pairs = p_transposed, k_transposed, e_transposed, h_transposed, None, None
    else:
        if plan.rounds is not None:
            plan.rounds((w1, w2, w1_operand, w2_operand))
        else:
            w1_operand, w2_operand = w1, w2
        k_operand, w2_transposed = k, w2_operand
        pairs = p, k, e, h, None, None
    plan.hidden((k_operand, w1_operand, b1, z, h, h_transposed))
    plan.residual((h, w2_operand, b2, v, row_weights, e, e_transposed, e_sums, losses))
    plan.slope((e, w2_transposed, z, dh, p, p_transposed, p_sums))
    plan.gradients.run(pairs, (p_sums, e_sums), None, gradient, squares, factor)
    plan.step(
        (
            *(*state, *gradient, alpha, eta, theta, squares, losses),
            *(*results[:8], loss, norm, skipped),
        ),
        (0.5 * factor, max_grad_norm or 0.0),
    )
    return results


@functools.lru_cache(maxsize=4096)
def update_plan(
    shape: tuple[int, ...],
    units: int,
    inputs: tuple[Layout | None, ...],
    activation: str,
    clips: bool,
    precision: str,
    device: torch.device,
) -> UpdatePlan:
    """The plan for inputs of these layouts and a memory of ``units`` hidden units."""
    problem, copies = problem_of(shape, units, inputs, activation, precision, device)
    rows, width, hidden = problem.sizes
    describes = launch_hopper.serves(problem, inputs[-1] is not None)
    problem = problem._replace(by_turns=describes)
    residual: UpdateTile | launch_hopper.HopperTile
    slope: UpdateTile | launch_hopper.HopperTile
    launches: tuple[Launch | RowsLaunch, Launch | RowsLaunch, Launch | RowsLaunch]
    if describes:
        residual = slope = launch_hopper.TILE
        launches = (
            launch_hopper.rows_launch(problem, "hidden"),
            launch_hopper.rows_launch(problem, "residual"),
            launch_hopper.rows_launch(problem, "slope"),
        )
    else:
        residual = problem.tile(RESIDUAL if inputs[-1] is None else WEIGHTED_RESIDUAL, width)
        slope = problem.tile(SLOPE, hidden)
        first = kernels.hidden_kernel, problem.tile(HIDDEN, hidden), hidden
        launches = (
            problem.rows_launch(*first, (*problem.key_operands, *problem.sizes)),
            problem.rows_launch(
                kernels.residual_kernel, residual, width, (*problem.values, *problem.sizes)
            ),
            problem.rows_launch(kernels.slope_kernel, slope, hidden, problem.sizes),
        )
    residual_tiles, slope_tiles = cdiv(rows, residual.rows), cdiv(rows, slope.rows)
    loss_tiles = residual_tiles * cdiv(width, residual.cols)
    gradients = plan_gradients(problem, GRADIENTS, (slope_tiles, residual_tiles))
    programs = problem.element_programs(STEP.block)
    weights, number = problem.weights(), problem.allocator()
    of_width, of_hidden = problem.operand(rows, width), problem.operand(rows, hidden)
    keys, by_width, by_hidden = problem.transposed_rows()
    return UpdatePlan(
        round_launch(problem) if problem.rounds and not problem.transposes else None,
        transpose_launch(problem, backward=False) if problem.transposes else None,
        launches[0],
        launches[1],
        launches[2],
        gradients,
        problem.element_launch(
            kernels.step_kernel,
            STEP,
            (width, hidden, programs, gradients.slots, loss_tiles),
            clips=clips,
        ),
        describes,
        copies,
        results=(
            *(*weights, *weights, number, number, problem.allocator(dtype=torch.bool)),
            *(of_hidden, of_hidden, of_width, of_hidden, of_hidden, *weights),
        ),
        partials=(
            problem.allocator(residual_tiles, width),
            problem.allocator(slope_tiles, hidden),
            problem.allocator(loss_tiles),
            problem.allocator(gradients.slots),
        ),
        operands=(
            *(problem.weight_operands() if problem.rounds else (None, None)),
            *(keys, by_width, by_hidden, by_width, by_hidden),
            problem.operand(hidden, width) if problem.transposes else None,
        ),
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
