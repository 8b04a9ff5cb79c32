"""The launches of sliding_window_attention, forward and backward: their configurations and
plans.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocator,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import input_precision
from ..common.launch import (
    BACKWARD_PROGRAMS_PER_SM,
    ForwardPlan,
    Gradients,
    Outputs,
    TileLaunch,
    gradient_allocators,
    plan_add_chunks,
    plan_dq,
    plan_forward,
    plan_outputs,
)
from ..common.operands import Shape, is_aligned
from ..common.problem import HOPPER, Problem, TileConfig, chunk_rows, problem_of, tile_config

if TYPE_CHECKING:
    from . import kernels, kernels_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")

# Each table is read from the top; the first line that fits serves. The algorithms do not depend on
# it. Of a band no more than some tiles are seen, so small ones waste less at its borders. Source:
# results/tuning-h200-torch2.11-triton3.6.csv for the lines of heads of 64 and 40 columns in bf16;
# those of 40 serve a long band and a segment of TitanMAC. The others are unmeasured.
FORWARD = (
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=2, **HOPPER),
    TileConfig(16, 2, queries=64, keys=32, num_warps=4, num_stages=2),
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=64, keys=32, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
DQ = (
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=2),
    TileConfig(128, 4, queries=16, keys=32, num_warps=8, num_stages=2),
)
DKDV = (
    TileConfig(64, 2, queries=32, keys=64, num_warps=4, num_stages=2),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2),
    TileConfig(16, 4, queries=16, keys=16, num_warps=4, num_stages=2),
    TileConfig(64, 4, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2),
)


class Band(NamedTuple):
    """Which keys the rows of one sequence see: all of a prefix, and a window of the others; a query
    is the last of ``every`` rows.
    """

    window: int
    prefix: int
    every: int = 1


class BackwardLaunches(NamedTuple):
    """One launch for dq, and for delta, which the next needs: dk and dv. Those of a prefix come as
    partial sums of chunks of queries, which one more launch adds; without a prefix there is
    neither.
    """

    dq: TileLaunch
    dkdv: TileLaunch
    delta: Allocator
    add_chunks: Launch | None
    partial_sums: Allocator | None


class BackwardPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or keys), which of do, q, k
    and v it copies first, and the allocators of dq, dk and dv.
    """

    launches: BackwardLaunches | None
    copies: tuple[bool, ...]
    dq: Allocator
    dk: Allocator
    dv: Allocator


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    scale: float,
    with_lse: bool,
    keep: bool = True,
) -> Outputs:
    """Attention of ``q`` [B, Nq, H, D], the last rows of a sequence, to the keys of a band of ``k``
    and ``v`` [B, M, H, D].

    Returns:
        ``(o, lse, softmax, o_low)`` as :meth:`ForwardPlan.run`: lse is None without ``with_lse``,
        softmax and o_low without ``keep``, o_low for fp32 too.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return attention_forward(q, k, v, band, scale, with_lse, keep)
    operands = q, k, v
    plan = forward_plan(
        q.shape,
        k.shape[1],
        layouts(*operands),
        band,
        with_lse,
        keep,
        is_aligned(*operands),
        input_precision(q.dtype),
        q.device,
    )
    return plan.run(operands, (), scale)


def attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    o_low: torch.Tensor | None,
    softmax: torch.Tensor,
    band: Band,
    scale: float,
) -> Gradients:
    """Gradients ``(dq, dk, dv)``, contiguous, from those of o and lse.

    Args:
        do: gradient of o.
        dlse: gradient of lse, or None.
        q, k, v, band, scale: as in the forward pass.
        o, o_low, softmax: what the forward pass returned.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return attention_backward(do, dlse, q, k, v, o, o_low, softmax, band, scale)
    if dlse is not None:
        dlse = dlse.contiguous()
    operands = do, q, k, v
    plan = backward_plan(
        q.shape,
        k.shape[1],
        layouts(*operands),
        band,
        dlse is not None,
        is_aligned(*operands),
        input_precision(q.dtype),
        q.device,
    )
    dq, dk, dv = plan.dq(), plan.dk(), plan.dv()
    if plan.launches is None:
        for grad in (dq, dk, dv):
            grad.zero_()
        return dq, dk, dv
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    launch_dq, launch_dkdv, allocate_delta, add_chunks, allocate_partial_sums = plan.launches
    delta = allocate_delta()
    launch_dq(operands, (dlse, o, o_low, softmax, delta, dq), scale)
    # Without a prefix nothing is written to the partial sums.
    dk_partial = dk if allocate_partial_sums is None else allocate_partial_sums()
    dv_partial = dv if allocate_partial_sums is None else allocate_partial_sums()
    launch_dkdv(operands, (softmax, delta, dk_partial, dv_partial, dk, dv), scale)
    if add_chunks is not None:
        add_chunks((dk_partial, dv_partial, dk, dv))
    return dq, dk, dv


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Layout | None, ...],
    band: Band,
    with_lse: bool,
    keep: bool,
    aligned: bool,
    precision: str,
    device: torch.device,
) -> ForwardPlan:
    """The plan for operands of these layouts: q, k and v; ``aligned`` if descriptors may start
    where they do.
    """
    problem = problem_of(
        *(shape, keys, operands, aligned, precision, device), integers_of(band, keys)
    )
    launch = None
    if math.prod(shape):
        config = tile_config(FORWARD, problem)
        launch = plan_forward(kernels.window_forward_kernel, problem, config, with_lse, keep)
    return ForwardPlan(launch, problem.copies, plan_outputs(problem, with_lse, keep))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Layout | None, ...],
    band: Band,
    has_dlse: bool,
    aligned: bool,
    precision: str,
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these layouts: do, q, k and v; ``aligned`` if descriptors may start
    where they do.
    """
    problem = problem_of(
        *(shape, keys, operands, aligned, precision, device), integers_of(band, keys)
    )
    launches = None
    if math.prod(shape) and keys:
        launches = plan_backward(problem, band.prefix, has_dlse)
    return BackwardPlan(launches, problem.copies, *gradient_allocators(problem))


def integers_of(band: Band, keys: int) -> tuple[int, int, int]:
    """What the kernels take of a band."""
    # No row sees further back than to the first key.
    return min(band.window, keys), band.prefix, band.every


def plan_backward(problem: Problem, prefix: int, has_dlse: bool) -> BackwardLaunches:
    config = tile_config(DKDV, problem)
    prefix_tiles = cdiv(prefix, config.keys)
    programs = BACKWARD_PROGRAMS_PER_SM * problem.gpu.multiprocessors
    tiles_of_all = problem.all_heads * max(prefix_tiles, 1)
    chunk = chunk_rows(tiles_of_all, problem.queries, config.queries, programs)
    chunks = cdiv(problem.queries, chunk)
    key_tiles = cdiv(problem.keys - prefix, config.keys)
    add_chunks, partial_sums = plan_add_chunks(problem, chunks, prefix) if prefix else (None, None)
    return BackwardLaunches(
        plan_dq(kernels_backward.window_dq_kernel, problem, tile_config(DQ, problem), has_dlse),
        TileLaunch(
            kernels_backward.window_dkdv_kernel,
            problem,
            config,
            problem.all_heads * (prefix_tiles * chunks + key_tiles),
            (problem.all_heads * problem.queries, problem.batches, chunk),
            DESCRIPTORS=config.descriptors,
        ),
        allocator(problem.rows, torch.float32, problem.device),
        add_chunks,
        partial_sums,
    )
