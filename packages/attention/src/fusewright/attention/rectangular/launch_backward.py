"""The launches of the backward pass of rectangular_attention: their configurations and plan."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, Launch, allocator, cdiv, contiguous_where
from .._core.lazy import lazy_module
from ..common.launch import (
    BACKWARD_PROGRAMS_PER_SM,
    BackwardPlan,
    Gradients,
    TileLaunch,
    plan_add_chunks,
    plan_backward,
    plan_query_tiles,
)
from ..common.problem import (
    DESCRIBED,
    HOPPER,
    Key,
    Problem,
    TileConfig,
    chunk_rows,
    key_of,
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
    if dlse is not None:
        dlse = dlse.contiguous()
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    operands = do, q, k, v
    plan = backward_plan(key_of(operands, key_lengths, dlse))
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
def backward_plan(key: Key) -> BackwardPlan:
    """The plan for a call that reads do, q, k, v, key_lengths and dlse."""
    problem = problem_of(key, 4)
    launches = None
    if math.prod(problem.query_shape) and problem.keys:
        plan = plan_single_tile if in_single_tile(problem) else plan_streaming
        launches = plan(problem)
    return plan_backward(problem, launches)


def plan_single_tile(problem: Problem) -> SingleTile | SingleTileChunks:
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
    )
    if chunks == 1:
        return SingleTile(launch)
    return SingleTileChunks(launch, *plan_add_chunks(problem, chunks, problem.keys))


def plan_streaming(problem: Problem) -> Streaming:
    kernels, config = kernels_streaming_backward, tile_config(DKDV, problem)
    return Streaming(
        plan_query_tiles(kernels.streaming_dq_kernel, problem, tile_config(DQ, problem)),
        TileLaunch(
            kernels.streaming_dkdv_kernel,
            problem,
            config,
            problem.all_heads * cdiv(problem.keys, config.keys),
            (problem.all_heads * problem.queries,),
        ),
        allocator(problem.rows, torch.float32, problem.device),
    )
