"""The launches of the backward pass of rectangular_attention: their configurations and plan."""

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
    Gradients,
    TileLaunch,
    gradient_allocators,
    plan_add_chunks,
    plan_dq,
)
from ..common.operands import Shape, is_aligned
from ..common.problem import (
    DESCRIBED,
    HOPPER,
    Problem,
    TileConfig,
    chunk_rows,
    problem_of,
    tile_config,
)
from .launch import SingleTileConfig, in_single_tile, single_tile_config

if TYPE_CHECKING:
    from . import kernels_single_tile, kernels_streaming_backward
else:
    kernels_single_tile = lazy_module(__package__, "kernels_single_tile")
    kernels_streaming_backward = lazy_module(__package__, "kernels_streaming_backward")

# Each table is read from the top; the first line that fits serves. The algorithms do not depend on
# it. Source: results/tuning-h200-torch2.11-triton3.6.csv for the lines for Hopper, heads of 32, 64
# and 128 columns in bf16, and docs/decisions/0004; the others are unmeasured.
DQ = (
    TileConfig(32, 2, queries=64, keys=64, num_warps=4, num_stages=4, **DESCRIBED),
    TileConfig(64, 2, queries=128, keys=64, num_warps=4, num_stages=4, **DESCRIBED),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=128, keys=64, num_warps=8, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=32, keys=16, num_warps=8, num_stages=2),
)
DKDV = (
    TileConfig(32, 2, queries=32, keys=128, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **DESCRIBED),
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=32, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=32, keys=64, num_warps=4, num_stages=2),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2),
)
SINGLE_TILE_BACKWARD = (
    SingleTileConfig(16, 64, 2, queries=32, num_warps=4, num_stages=2),
    SingleTileConfig(64, 64, 2, queries=64, num_warps=4, num_stages=3, **HOPPER),
    SingleTileConfig(64, 64, 2, queries=32, num_warps=8, num_stages=3),
    SingleTileConfig(128, 32, 2, queries=64, num_warps=4, num_stages=2, **HOPPER),
    SingleTileConfig(128, 32, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(128, 64, 2, queries=16, num_warps=4, num_stages=3, **HOPPER),
    SingleTileConfig(128, 64, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(64, 128, 2, queries=64, num_warps=8, num_stages=3, **HOPPER),
    SingleTileConfig(64, 128, 2, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(16, 32, 4, queries=16, num_warps=4, num_stages=2),
    SingleTileConfig(16, 64, 4, queries=16, num_warps=4, num_stages=1),
    SingleTileConfig(128, 16, 4, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(128, 32, 4, queries=32, num_warps=16, num_stages=1),
    SingleTileConfig(64, 128, 4, queries=32, num_warps=16, num_stages=1),
)


class SingleTile(NamedTuple):
    """One launch for all gradients."""

    gradients: TileLaunch


class SingleTileChunks(NamedTuple):
    """One launch for dq and for each chunk of queries' partial sums of dk and dv, and one that adds
    these.
    """

    gradients: TileLaunch
    add_chunks: Launch
    partial_sums: Allocator


class Streaming(NamedTuple):
    """One launch for dq, and for delta, which the next needs: dk and dv."""

    dq: TileLaunch
    dkdv: TileLaunch
    delta: Allocator


class BackwardPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or keys), which of do, q, k
    and v it copies first, and the allocators of dq, dk and dv.
    """

    launches: SingleTile | SingleTileChunks | Streaming | None
    copies: tuple[bool, ...]
    dq: Allocator
    dk: Allocator
    dv: Allocator


def attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    o: torch.Tensor | None,
    o_low: torch.Tensor | None,
    softmax: torch.Tensor | None,
    scale: float,
) -> Gradients:
    """Gradients ``(dq, dk, dv)``, contiguous, from those of o and lse.

    Args:
        do: gradient of o.
        dlse: gradient of lse, or None.
        q, k, v, key_lengths, scale: as in the forward pass.
        o, o_low, softmax: what the forward pass returned; not read where keys are one tile.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return attention_backward(do, dlse, q, k, v, key_lengths, o, o_low, softmax, scale)
    if dlse is not None:
        dlse = dlse.contiguous()
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    operands = do, q, k, v
    plan = backward_plan(
        q.shape,
        k.shape[1],
        layouts(*operands, key_lengths),
        dlse is not None,
        is_aligned(*operands),
        input_precision(q.dtype),
        q.device,
    )
    dq, dk, dv = plan.dq(), plan.dk(), plan.dv()
    if plan.copies:
        operands = contiguous_where(operands, plan.copies)
    match plan.launches:
        case SingleTile(gradients):
            gradients(operands, (dlse, key_lengths, dq, dk, dv), scale)
        case SingleTileChunks(gradients, add_chunks, allocate_partial_sums):
            dk_partial, dv_partial = allocate_partial_sums(), allocate_partial_sums()
            gradients(operands, (dlse, key_lengths, dq, dk_partial, dv_partial), scale)
            add_chunks((dk_partial, dv_partial, dk, dv))
        case Streaming(launch_dq, launch_dkdv, allocate_delta):
            delta = allocate_delta()
            launch_dq(operands, (dlse, key_lengths, o, o_low, softmax, delta, dq), scale)
            launch_dkdv(operands, (key_lengths, softmax, delta, dk, dv), scale)
        case None:
            for grad in (dq, dk, dv):
                grad.zero_()
    return dq, dk, dv


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: Shape,
    keys: int,
    operands: tuple[Layout | None, ...],
    has_dlse: bool,
    aligned: bool,
    precision: str,
    device: torch.device,
) -> BackwardPlan:
    """The plan for operands of these layouts: do, q, k, v and key_lengths; ``aligned`` if
    descriptors may start where they do.
    """
    *read, lengths = operands
    problem = problem_of(
        *(shape, keys, read, aligned, precision, device), HAS_LENGTHS=lengths is not None
    )
    launches = None
    if math.prod(shape) and keys:
        plan = plan_single_tile if in_single_tile(problem) else plan_streaming
        launches = plan(problem, has_dlse)
    return BackwardPlan(launches, problem.copies, *gradient_allocators(problem))


def plan_single_tile(problem: Problem, has_dlse: bool) -> SingleTile | SingleTileChunks:
    config = single_tile_config(SINGLE_TILE_BACKWARD, problem)
    programs = BACKWARD_PROGRAMS_PER_SM * problem.gpu.multiprocessors
    chunk = chunk_rows(problem.all_heads, problem.queries, config.queries, programs)
    chunks = cdiv(problem.queries, chunk)
    launch = TileLaunch(
        kernels_single_tile.single_tile_backward_kernel,
        problem,
        config,
        problem.all_heads * chunks,
        (problem.batches, chunk),
        HAS_DLSE=has_dlse,
    )
    if chunks == 1:
        return SingleTile(launch)
    return SingleTileChunks(launch, *plan_add_chunks(problem, chunks, problem.keys))


def plan_streaming(problem: Problem, has_dlse: bool) -> Streaming:
    config = tile_config(DKDV, problem)
    return Streaming(
        plan_dq(
            kernels_streaming_backward.streaming_dq_kernel,
            problem,
            tile_config(DQ, problem),
            has_dlse,
        ),
        TileLaunch(
            kernels_streaming_backward.streaming_dkdv_kernel,
            problem,
            config,
            problem.all_heads * cdiv(problem.keys, config.keys),
            (problem.all_heads * problem.queries,),
            DESCRIPTORS=config.descriptors,
        ),
        allocator(problem.rows, torch.float32, problem.device),
    )
