"""The backward pass of memory_update: its tables, its plan, its launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

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
    GradientsPlan,
    UpdateBlock,
    UpdateProblem,
    UpdateTile,
    element_launch,
    element_programs,
    plan_gradients,
    problem_of,
    row_product_launch,
    tile_precision,
    tiles,
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
# gradient of the loss, are unmeasured.
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
# Where e_bar and r are computed at once there are as many sums as in Z_BAR.
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
    """Which upstream gradients exist (of W', of S', of the loss), whether there are row weights,
    and which gradients are needed (of k and v; of W).
    """

    from_weights: bool
    from_momentum: bool
    from_loss: bool
    row_weights: bool
    rows: bool
    weights: bool


class UpdateBackwardPlan(NamedTuple):
    """One backward pass: its launches in their order, which of k and v it copies first, and the
    allocators of its tensors.
    """

    inner_products: Launch
    cotangents: Launch
    transposes: Launch | None
    p_bar: Launch
    e_bar: Launch
    z_bar: Launch
    dk: Launch | None
    gradients: GradientsPlan | None
    copies: tuple[bool, bool]
    rounds: bool
    weight_operands: tuple[Allocator, Allocator]
    transposed: tuple[Allocator | None, ...]
    biases: tuple[Allocator, Allocator]
    partials: tuple[Allocator, ...]
    p_bar_rows: Allocator | None
    rows: tuple[Allocator, ...]
    drows: tuple[Allocator, Allocator] | None
    row_parts: Allocator | None
    drow_weights: Allocator | None
    weights: tuple[Allocator, ...]
    number: Allocator


def update_backward(
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
    """Gradients of all floating inputs of ``update_forward``.

    Args:
        upstream: the gradients of W', then those of S', None for each that does not exist.
        dloss: the gradient of the loss, or None.
        weights, momentum, gates, row_weights: inputs of the forward pass.
        norm, rows, gradient: its outputs; rows are z, h, e and p.
        with_rows, with_weights: whether the gradients of k and v, and of W, are needed.

    Returns:
        The gradients of k, v, W (four), S (four), alpha, eta, theta, row_weights; None where not
        needed.
    """
    if not is_current(k.device):
        with torch.cuda.device(k.device):
            return update_backward(
                upstream, dloss, k, v, weights, momentum, gates, row_weights, norm, rows,
                gradient, factor, activation, max_grad_norm, with_rows, with_weights,
            )  # fmt: skip
    uw, us = filled(upstream[:4], weights), filled(upstream[4:], weights)
    w1, b1, w2, b2 = (contiguous(x) for x in weights)
    plan = backward_plan(
        k.shape,
        w1.shape[-2],
        layouts(k, v),
        BackwardOptions(
            uw[0] is not None,
            us[0] is not None,
            dloss is not None,
            row_weights is not None,
            with_rows,
            with_weights,
        ),
        activation,
        max_grad_norm is not None,
        tile_precision(k.dtype),
        k.device,
    )
    if any(plan.copies):
        k, v = contiguous_where((k, v), plan.copies)
    row_weights = contiguous(row_weights)
    z, h, e, p = rows
    partials, q_sums, z_bar_sums = (allocator() for allocator in plan.partials)
    w1_operand, w2_operand = w1, w2
    if plan.rounds:
        w1_operand, w2_operand = plan.weight_operands[0](), plan.weight_operands[1]()
    a1, a2 = (allocator() for allocator in plan.weight_operands)
    a1_bias, a2_bias = (allocator() for allocator in plan.biases)
    ds = [allocator() for allocator in plan.weights]
    dw = [allocator() if with_weights else None for allocator in plan.weights]
    dgates = [plan.number() for _ in range(3)]
    dh_bar, q, z_bar = (allocator() for allocator in plan.rows)
    p_bar, row_parts = allocate(plan.p_bar_rows), allocate(plan.row_parts)
    drow_weights = allocate(plan.drow_weights)
    dk, dv = (None, None) if plan.drows is None else (plan.drows[0](), plan.drows[1]())

    state = (w1, b1, w2, b2, *map(contiguous, momentum))
    plan.inner_products((*uw, *us, *state, *gradient, norm, partials, w1_operand, w2_operand))
    plan.cotangents(
        (
            *(*uw, *us, *gradient, *map(contiguous, gates), norm, partials),
            *(a1, a1_bias, a2, a2_bias, *ds, *dw, *dgates),
        ),
        (max_grad_norm or 0.0,),
    )
    transposed = [allocate(allocator) for allocator in plan.transposed]
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
        products = (
            z_bar_transposed,
            k_transposed,
            e_transposed,
            dh_bar_transposed,
            q_transposed,
            h_transposed,
        )
    else:
        products = z_bar, k, e, dh_bar, q, h
        k_operand, a1_transposed, a2_transposed = k, a1, a2
        w1_transposed, w2_transposed = w1_operand, w2_operand
    plan.p_bar((k_operand, a1, a1_bias, z, norm, p_bar, dh_bar, dh_bar_transposed))
    plan.e_bar(
        (
            *(h, dh_bar, a2, a2_bias, w2_operand, b2, v, row_weights, contiguous(dloss), norm),
            *(q, q_transposed, dv, q_sums, row_parts),
        ),
        (factor,),
    )
    plan.z_bar(
        (
            *(e, q, a2_transposed, w2_transposed, z, p_bar, norm, row_parts),
            *(z_bar, z_bar_transposed, z_bar_sums, drow_weights),
        )
    )
    if plan.dk is not None:
        plan.dk((p, z_bar, a1_transposed, w1_transposed, norm, dk), (factor,))
    if plan.gradients is not None:
        plan.gradients.run(products, (z_bar_sums, q_sums), norm, dw, None, factor)
    return dk, dv, *dw, *ds, *dgates, drow_weights


def filled(
    upstream: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Four gradients or none: zeros for those of four that do not exist."""
    if all(x is None for x in upstream):
        return (None,) * 4
    return tuple(
        torch.zeros_like(w, memory_format=torch.contiguous_format) if x is None else contiguous(x)
        for x, w in zip(upstream, weights, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    units: int,
    operands: tuple[Layout, Layout],
    options: BackwardOptions,
    activation: str,
    clips: bool,
    precision: str,
    device: torch.device,
) -> UpdateBackwardPlan:
    """The plan for k and v of these layouts and a memory of ``units`` hidden units."""
    problem = problem_of(shape, units, *operands, activation, precision, device)
    rows, width, hidden = problem.sizes
    with_r = options.row_weights or options.from_loss
    e_bar = problem.tile(E_BAR_AND_R if with_r else E_BAR, width)
    z_bar = problem.tile(Z_BAR, hidden)
    q_tiles, z_bar_tiles = tiles(rows, e_bar), tiles(rows, z_bar)
    row_parts = cdiv(width, e_bar.cols)
    partials = element_programs(problem, INNER_PRODUCTS.block)
    return UpdateBackwardPlan(
        element_launch(
            kernels_backward.inner_products_kernel,
            problem,
            INNER_PRODUCTS,
            (width, hidden, partials),
            first=True,
        ),
        element_launch(
            kernels_backward.cotangents_kernel,
            problem,
            COTANGENTS,
            (width, hidden, element_programs(problem, COTANGENTS.block), partials),
            clips=clips,
        ),
        transpose_launch(problem, backward=True) if problem.transposes else None,
        row_product_launch(
            kernels_backward.p_bar_kernel,
            problem,
            problem.tile(P_BAR, hidden),
            hidden,
            width,
            (*problem.key_operands, *problem.sizes),
        ),
        row_product_launch(
            kernels_backward.e_bar_kernel,
            problem,
            e_bar,
            width,
            hidden,
            (*problem.values, *problem.sizes),
        ),
        row_product_launch(
            kernels_backward.z_bar_kernel,
            problem,
            z_bar,
            hidden,
            width,
            (*problem.sizes, row_parts),
        ),
        row_product_launch(
            kernels_backward.dk_kernel,
            problem,
            problem.tile(DK, width),
            width,
            hidden,
            problem.sizes,
        )
        if options.rows
        else None,
        plan_gradients(problem, DWEIGHTS, (z_bar_tiles, q_tiles)) if options.weights else None,
        problem.copies,
        problem.rounds,
        weight_operands=problem.weight_operands(),
        transposed=transposed_allocators(problem),
        biases=(problem.allocator(hidden), problem.allocator(width)),
        partials=(
            problem.allocator(3, partials),
            problem.allocator(q_tiles, width),
            problem.allocator(z_bar_tiles, hidden),
        ),
        p_bar_rows=problem.allocator(rows, hidden) if activation != "relu" else None,
        rows=(
            problem.operand(rows, hidden),
            problem.operand(rows, width),
            problem.operand(rows, hidden),
        ),
        drows=(problem.operand(rows, width), problem.operand(rows, width))
        if options.rows
        else None,
        row_parts=problem.allocator(row_parts, rows) if options.row_weights else None,
        drow_weights=problem.allocator(rows) if options.row_weights else None,
        weights=problem.weights(),
        number=problem.allocator(),
    )


def transposed_allocators(problem: UpdateProblem) -> tuple[Allocator | None, ...]:
    """For k as an operand, then for transposes of k, e, h, A1, A2, w1, w2, dh_bar, q and z_bar."""
    if not problem.transposes:
        return (None,) * 11
    rows, width, hidden = problem.sizes
    by_width, by_hidden = problem.transposed_rows(width), problem.transposed_rows(hidden)
    matrix1, matrix2 = problem.operand(width, hidden), problem.operand(hidden, width)
    weights = matrix1, matrix2, matrix1, matrix2
    keys = problem.operand(rows, width)
    return keys, by_width, by_width, by_hidden, *weights, by_hidden, by_width, by_hidden
