"""The backward pass of memory_update: its tables, its plan, its launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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
from ..common.operands import contiguous
from . import launch_hopper
from .launch_hopper import RowsLaunch
from .problem import (
    ANY_SIZE,
    GRADIENTS_ANY_SIZE,
    HOPPER,
    GradientsPlan,
    UpdateBlock,
    UpdateProblem,
    UpdateTile,
    plan_gradients,
    problem_of,
    tile_precision,
    transpose_launch,
)

if TYPE_CHECKING:
    from . import kernels_backward
else:
    kernels_backward = lazy_module(__package__, "kernels_backward")

Tensor = torch.Tensor

# Each table is read from the top: the first line that fits serves. The results do not depend on it.
# Source: results/tuning-update-h200-torch2.11-triton3.6.csv for the tiles of Hopper and the blocks
# of elements. At the sizes that it serves there, a tile is at most 3 % slower than the fastest, a
# block, which serves all sizes and dtypes, 7 %. Other tiles, and those for row weights and the
# gradient of the loss, E_BAR_AND_R, are unmeasured.
P_BAR = (
    UpdateTile("narrow", 128, 64, 64, num_warps=8, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 128, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=8, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3),
    *ANY_SIZE,
)
E_BAR = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 128, 64, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("narrow", 64, 64, 32, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 128, 32, num_warps=8, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=2),
    *ANY_SIZE,
)
Z_BAR = (
    UpdateTile("narrow", 128, 64, 64, num_warps=8, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3, **HOPPER),
    UpdateTile("narrow", 64, 64, 32, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=3, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=2),
    *ANY_SIZE,
)
# Where e_bar and r are computed at once there are twice as many sums as in E_BAR.
E_BAR_AND_R = Z_BAR
DK = (
    UpdateTile("narrow", 128, 128, 64, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("narrow", 64, 128, 64, num_warps=4, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("narrow", 64, 32, 128, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("narrow", 64, 64, 32, num_warps=4, num_stages=3),
    UpdateTile("tf32", 128, 128, 32, num_warps=4, num_stages=3, fills=1.5, **HOPPER),
    UpdateTile("tf32", 128, 64, 32, num_warps=8, num_stages=4, fills=0.5, **HOPPER),
    UpdateTile("tf32", 64, 32, 64, num_warps=4, num_stages=4, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=2),
    *ANY_SIZE,
)
DWEIGHTS = (
    UpdateTile("narrow", 64, 128, 128, num_warps=4, num_stages=4, fills=0.8, **HOPPER),
    UpdateTile("narrow", 64, 64, 128, num_warps=4, num_stages=7, **HOPPER),
    UpdateTile("narrow", 64, 64, 64, num_warps=4, num_stages=3),
    UpdateTile("tf32", 64, 128, 64, num_warps=4, num_stages=4, fills=1.5, **HOPPER),
    UpdateTile("tf32", 64, 64, 64, num_warps=4, num_stages=3, fills=1.2, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=4, num_stages=8, **HOPPER),
    UpdateTile("tf32", 64, 64, 32, num_warps=8, num_stages=3),
    *GRADIENTS_ANY_SIZE,
)
INNER_PRODUCTS = UpdateBlock(block=1024, num_warps=4)
COTANGENTS = UpdateBlock(block=1024, num_warps=8)


class BackwardOptions(NamedTuple):
    """Which upstream gradients exist (of W', of S', of the loss), and which gradients are needed
    (of k and v; of W).
    """

    from_weights: bool
    from_momentum: bool
    from_loss: bool
    rows: bool
    weights: bool


class UpdateBackwardPlan(NamedTuple):
    """One backward pass: its launches in their order, whether they read k by a descriptor, which
    inputs it copies first, and the allocators of its tensors: results, intermediate ones (A and its
    biases, partial sums, dh_bar, q, z_bar, p_bar, parts of the row weights' gradients), w1 and w2
    rounded, and what TF32 products read, as in ``transposed_operands``.
    """

    inner_products: Launch
    cotangents: Launch
    transposes: Launch | None
    p_bar: Launch | RowsLaunch
    e_bar: Launch | RowsLaunch
    z_bar: Launch | RowsLaunch
    dk: Launch | RowsLaunch | None
    gradients: GradientsPlan | None
    describes: bool
    copies: tuple[bool, ...]
    results: tuple[Allocator | None, ...]
    intermediate: tuple[Allocator | None, ...]
    rounded: tuple[Allocator, Allocator] | None
    transposed: tuple[Allocator | None, ...]


def update_backward(
    upstream: Sequence[Tensor | None],
    inputs: tuple[Any, ...],
    saved: Sequence[Tensor],
    factor: float,
    activation: str,
    max_grad_norm: float | None,
    with_rows: bool,
    with_weights: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of all floating inputs of ``update_forward``.

    Args:
        upstream: the gradients of W', then those of S', then of the loss, None for each that does
            not exist.
        inputs, factor, activation, max_grad_norm: of the forward pass.
        saved: results of the forward pass: norm, z, h, e, dh and p, the gradient.
        with_rows, with_weights: whether the gradients of k and v, and of W, are needed.

    Returns:
        The gradients of k, v, W (four), S (four), alpha, eta, theta, row weights; None where not
        needed.
    """
    k, _, w1, *_ = inputs
    uw, us, dloss = filled(upstream[:4], inputs), filled(upstream[4:8], inputs), upstream[8]
    needed = BackwardOptions(
        uw[0] is not None, us[0] is not None, dloss is not None, with_rows, with_weights
    )
    precision, clips = tile_precision(k.dtype), max_grad_norm is not None
    options = layouts(*inputs), needed, activation, clips, precision, k.device
    plan = backward_plan(k.shape, w1.shape[-2], *options)
    if plan.copies:
        inputs = contiguous_where(inputs, plan.copies)
    k, v, *state, alpha, eta, theta, row_weights = inputs
    if plan.describes:
        k = in_bulk(k)
    w1, _, w2, b2, *_ = state
    norm, z, h, e, dh, p, *gradient = saved
    results = tuple([allocate(result) for result in plan.results])
    dk, dv, *dstate, drow_weights = results
    dw, ds, dgates = dstate[:4], dstate[4:8], dstate[8:]
    intermediate = [allocate(tensor) for tensor in plan.intermediate]
    a1, a1_bias, a2, a2_bias, partials, q_sums, z_bar_sums, *rows = intermediate
    dh_bar, q, z_bar, p_bar, row_parts = rows
    w1_operand, w2_operand = w1, w2
    if plan.rounded is not None:
        w1_operand, w2_operand = plan.rounded[0](), plan.rounded[1]()
    plan.inner_products((*uw, *us, *state, *gradient, norm, partials, w1_operand, w2_operand))
    plan.cotangents(
        (
            *(*uw, *us, *gradient, alpha, eta, theta, norm, partials),
            *(a1, a1_bias, a2, a2_bias, *ds, *dw, *dgates),
        ),
        (max_grad_norm or 0.0,),
    )
    transposed = [allocate(operand) for operand in plan.transposed]
    k_operand, k_transposed, e_transposed, h_transposed = transposed[:4]
    a1_transposed, a2_transposed, w1_transposed, w2_transposed = transposed[4:8]
    dh_bar_transposed, q_transposed, z_bar_transposed = transposed[8:]
    if plan.transposes is not None:
        weights_out = None, w1_transposed, None, w2_transposed
        plan.transposes(
            (
                *(k, w1, w2, e, h, a1, a2, k_operand, k_transposed, *weights_out),
                *(e_transposed, h_transposed, a1_transposed, a2_transposed),
            )
        )
        first = z_bar_transposed, k_transposed
        products = *first, e_transposed, dh_bar_transposed, q_transposed, h_transposed
    else:
        products = z_bar, k, e, dh_bar, q, h
        k_operand, a1_transposed, a2_transposed = k, a1, a2
        w1_transposed, w2_transposed = w1_operand, w2_operand
    # Hopper's launch writes u = p_bar * dh * act''(z) where p_bar would be, and z_bar's reads it.
    beside = (z, dh) if plan.describes else (z,)
    plan.p_bar((k_operand, a1, a1_bias, *beside, norm, p_bar, dh_bar, dh_bar_transposed))
    # Where rows have no weights, e is what the launch would make of v.
    values = e if plan.describes else v
    plan.e_bar(
        (
            *(h, dh_bar, a2, a2_bias, w2_operand, b2, values, row_weights),
            *(contiguous(dloss), norm),
            *(q, q_transposed, dv, q_sums, row_parts),
        ),
        (factor,),
    )
    plan.z_bar(
        (
            *(e, q, a2_transposed, w2_transposed, z, dh, p_bar, norm, row_parts),
            *(z_bar, z_bar_transposed, z_bar_sums, drow_weights),
        )
    )
    if plan.dk is not None:
        plan.dk((p, z_bar, a1_transposed, w1_transposed, norm, dk), (factor,))
    if plan.gradients is not None:
        plan.gradients.run(products, (z_bar_sums, q_sums), norm, dw, None, factor)
    return results


def filled(
    upstream: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Four gradients, of tensors like the memory, or none: zeros for those of four that do not
    exist.
    """
    if all(x is None for x in upstream):
        return (None,) * 4
    return tuple(
        torch.zeros_like(w, memory_format=torch.contiguous_format) if x is None else contiguous(x)
        for x, w in zip(upstream, inputs[2:6], strict=True)
    )


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    units: int,
    inputs: tuple[Layout | None, ...],
    needed: BackwardOptions,
    activation: str,
    clips: bool,
    precision: str,
    device: torch.device,
) -> UpdateBackwardPlan:
    """The plan for inputs of these layouts and a memory of ``units`` hidden units."""
    problem, copies = problem_of(shape, units, inputs, activation, precision, device)
    rows, width, hidden = problem.sizes
    has_row_weights = inputs[-1] is not None
    describes = launch_hopper.serves(problem, has_row_weights)
    problem = problem._replace(by_turns=describes)
    e_bar: UpdateTile | launch_hopper.HopperTile
    z_bar: UpdateTile | launch_hopper.HopperTile
    launches: tuple[Launch | RowsLaunch, Launch | RowsLaunch, Launch | RowsLaunch]
    dk: Launch | RowsLaunch
    if describes:
        e_bar = z_bar = launch_hopper.TILE
        row_parts = cdiv(width, e_bar.cols)
        launches = (
            launch_hopper.rows_launch(problem, "p_bar", other=activation != "relu"),
            launch_hopper.rows_launch(
                problem, "e_bar", other=needed.rows, from_loss=needed.from_loss
            ),
            launch_hopper.rows_launch(problem, "z_bar"),
        )
        dk = launch_hopper.rows_launch(problem, "dk")
    else:
        with_r = has_row_weights or needed.from_loss
        e_bar = problem.tile(E_BAR_AND_R if with_r else E_BAR, width)
        z_bar = problem.tile(Z_BAR, hidden)
        row_parts = cdiv(width, e_bar.cols)
        of_keys = (*problem.key_operands, *problem.sizes)
        of_values = (*problem.values, *problem.sizes)
        by_p_bar = kernels_backward.p_bar_kernel, problem.tile(P_BAR, hidden), hidden
        by_dk = kernels_backward.dk_kernel, problem.tile(DK, width), width
        launches = (
            problem.rows_launch(*by_p_bar, of_keys),
            problem.rows_launch(kernels_backward.e_bar_kernel, e_bar, width, of_values),
            problem.rows_launch(
                kernels_backward.z_bar_kernel, z_bar, hidden, (*problem.sizes, row_parts)
            ),
        )
        dk = problem.rows_launch(*by_dk, problem.sizes)
    q_tiles, z_bar_tiles = cdiv(rows, e_bar.rows), cdiv(rows, z_bar.rows)
    partials = problem.element_programs(INNER_PRODUCTS.block)
    programs = problem.element_programs(COTANGENTS.block)
    of_width, of_hidden = problem.operand(rows, width), problem.operand(rows, hidden)
    a1, a2 = problem.weight_operands()
    weights, number = problem.weights(), problem.allocator()
    return UpdateBackwardPlan(
        problem.element_launch(
            kernels_backward.inner_products_kernel,
            INNER_PRODUCTS,
            (width, hidden, partials),
            first=True,
        ),
        problem.element_launch(
            kernels_backward.cotangents_kernel,
            COTANGENTS,
            (width, hidden, programs, partials),
            clips=clips,
        ),
        transpose_launch(problem, backward=True) if problem.transposes else None,
        launches[0],
        launches[1],
        launches[2],
        dk if needed.rows else None,
        plan_gradients(problem, DWEIGHTS, (z_bar_tiles, q_tiles)) if needed.weights else None,
        describes,
        copies,
        results=(
            *([of_width] * 2 if needed.rows else [None] * 2),
            *(weights if needed.weights else [None] * 4),
            *(*weights, number, number, number),
            problem.allocator(rows) if has_row_weights else None,
        ),
        intermediate=(
            *(a1, problem.allocator(hidden), a2, problem.allocator(width)),
            problem.allocator(3, partials),
            problem.allocator(q_tiles, width),
            problem.allocator(z_bar_tiles, hidden),
            *(of_hidden, of_width, of_hidden),
            of_hidden if activation != "relu" else None,
            problem.allocator(row_parts, rows) if has_row_weights else None,
        ),
        rounded=(a1, a2) if problem.rounds else None,
        transposed=transposed_operands(problem),
    )


def transposed_operands(problem: UpdateProblem) -> tuple[Allocator | None, ...]:
    """For k as an operand, then for transposes of k, e, h, A1, A2, w1, w2, dh_bar, q and z_bar."""
    if not problem.transposes:
        return (None,) * 11
    keys, by_width, by_hidden = problem.transposed_rows()
    matrix1 = problem.operand(problem.width, problem.hidden)
    matrix2 = problem.operand(problem.hidden, problem.width)
    weights = matrix1, matrix2, matrix1, matrix2
    return keys, by_width, by_width, by_hidden, *weights, by_hidden, by_width, by_hidden
