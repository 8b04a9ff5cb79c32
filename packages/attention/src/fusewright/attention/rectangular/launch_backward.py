"""The launches of the backward pass of rectangular_attention: their configurations and plan."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from .._core.launches import allocator, cdiv
from .._core.lazy import lazy_module
from ..common.launch import (
    BACKWARD_PROGRAMS_PER_SM,
    BackwardPlan,
    Gradients,
    plan_add_chunks,
    plan_backward,
    plan_query_tiles,
    tile_launch,
)
from ..common.launch_sinks import plan_sinks
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
from .launch_hopper_backward import (
    HopperBackwardPlan,
    hopper_backward_config,
    plan_hopper_backward,
)
from .launch_hopper_single_tile import (
    HopperSingleTileBackwardPlan,
    hopper_single_tile_config,
    plan_hopper_single_tile_backward,
)

if TYPE_CHECKING:
    from . import kernels_single_tile, kernels_streaming_backward
else:
    kernels_single_tile = lazy_module(__package__, "kernels_single_tile")
    kernels_streaming_backward = lazy_module(__package__, "kernels_streaming_backward")

# Each table is read from the top; the first line that fits serves. The algorithms do not depend on
# it. Source: results/tuning-h200-torch2.11-triton3.6.csv for the lines for Hopper, heads of 32, 64
# and 128 columns in bf16, and docs/decisions/0004; the others are unmeasured. Where values have
# another width than keys, and in fp32 of heads wider than 128, some spill a few registers.
DQ = (
    TileConfig(32, 2, queries=64, keys=64, num_warps=4, num_stages=4, **DESCRIBED),
    TileConfig(64, 2, queries=128, keys=64, num_warps=4, num_stages=4, plain=True, **DESCRIBED),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=128, keys=64, num_warps=8, num_stages=3, plain=True),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=32, keys=16, num_warps=8, num_stages=2),
    TileConfig(256, 2, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
DKDV = (
    TileConfig(32, 2, queries=32, keys=128, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **DESCRIBED),
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=32, keys=64, num_warps=4, num_stages=3, plain=True, **HOPPER),
    TileConfig(128, 2, queries=32, keys=32, num_warps=4, num_stages=2, **HOPPER),
    TileConfig(64, 2, queries=32, keys=64, num_warps=4, num_stages=2),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2),
    TileConfig(256, 2, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
SINGLE_TILE_BACKWARD = (
    SingleTileConfig(16, 64, 2, queries=32, num_warps=4, num_stages=2),
    SingleTileConfig(64, 64, 2, queries=64, num_warps=4, num_stages=3, plain=True, **HOPPER),
    SingleTileConfig(64, 64, 2, queries=32, num_warps=8, num_stages=3),
    SingleTileConfig(128, 32, 2, queries=64, num_warps=4, num_stages=2, **HOPPER),
    SingleTileConfig(128, 32, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(128, 64, 2, queries=16, num_warps=4, num_stages=3, **HOPPER),
    SingleTileConfig(128, 64, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(64, 128, 2, queries=64, num_warps=8, num_stages=3, plain=True, **HOPPER),
    SingleTileConfig(64, 128, 2, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(16, 32, 4, queries=16, num_warps=4, num_stages=2),
    SingleTileConfig(16, 64, 4, queries=16, num_warps=4, num_stages=1),
    SingleTileConfig(128, 16, 4, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(128, 32, 4, queries=32, num_warps=16, num_stages=1),
    SingleTileConfig(64, 128, 4, queries=32, num_warps=16, num_stages=1, plain=True),
    SingleTileConfig(64, 128, 4, queries=32, num_warps=8, num_stages=1),
    SingleTileConfig(64, 256, 2, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(64, 256, 4, queries=16, num_warps=8, num_stages=1),
)


def attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    o: torch.Tensor | None,
    o_low: torch.Tensor | None,
    softmax: torch.Tensor | None,
    scale: float,
) -> Gradients:
    """Gradients ``(dq, dk, dv, dsinks)``, contiguous, from those of o and lse; dsinks is None
    without sinks.

    Args:
        do: gradient of o.
        dlse: gradient of lse, or None.
        q, k, v, key_lengths, sinks, scale: as in the forward pass.
        o, o_low, softmax: what the forward pass returned; not read where keys are one tile.
    """
    if dlse is not None:
        dlse = dlse.contiguous()
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    if sinks is not None:
        sinks = sinks.contiguous()
    plan = backward_plan(key_of((do, q, k, v), dlse, key_lengths, sinks))
    return plan.run((do, q, k, v, dlse, key_lengths, sinks), (o, o_low, softmax), scale)


@functools.lru_cache(maxsize=4096)
def backward_plan(key: Key) -> BackwardPlan | HopperBackwardPlan | HopperSingleTileBackwardPlan:
    """The plan for a call that reads do, q, k, v, dlse, key_lengths and sinks."""
    problem = problem_of(key, 4)
    if not (math.prod(problem.query_shape) and problem.keys):
        return plan_backward(problem)
    *_, dlse, lengths, _ = key[2]
    ragged = lengths is not None
    if in_single_tile(problem):
        line = hopper_single_tile_config(problem, key[3], backward=True)
        if line is not None:
            return plan_hopper_single_tile_backward(problem, line, ragged, dlse is not None)
        return plan_single_tile(problem)
    config = hopper_backward_config(problem, aligned=key[3])
    if config is not None:
        return plan_hopper_backward(problem, config, ragged)
    return plan_streaming(problem)


def plan_single_tile(problem: Problem) -> BackwardPlan:
    """One launch for all gradients; where queries are cut into chunks, those of dk and dv are
    partial sums, and those of sinks always.
    """
    config = single_tile_config(SINGLE_TILE_BACKWARD, problem)
    programs = BACKWARD_PROGRAMS_PER_SM * problem.gpu.multiprocessors
    chunk = chunk_rows(problem.all_key_heads, problem.queries, config.queries, programs)
    chunks = cdiv(problem.queries, chunk)
    launch = tile_launch(
        kernels_single_tile.single_tile_backward_kernel,
        problem,
        config,
        problem.all_key_heads * chunks,
        (problem.batches, chunk),
    )
    sums = plan_add_chunks(problem, chunks, problem.keys) if chunks > 1 else {}
    return plan_backward(problem, launch, **sums, sinks=plan_sinks(problem, chunks))


def plan_streaming(problem: Problem) -> BackwardPlan:
    kernels, config = kernels_streaming_backward, tile_config(DKDV, problem)
    of_dq = tile_config(DQ, problem)
    return plan_backward(
        problem,
        plan_query_tiles(kernels.streaming_dq_kernel, problem, of_dq),
        launch_dkdv=tile_launch(
            kernels.streaming_dkdv_kernel,
            problem,
            config,
            problem.all_key_heads * cdiv(problem.keys, config.keys),
            (problem.all_heads * problem.queries,),
        ),
        delta=allocator(problem.rows, torch.float32, problem.device),
        sinks=plan_sinks(problem, cdiv(problem.queries, of_dq.queries)),
    )
