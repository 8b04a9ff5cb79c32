"""The launches of sliding_window_attention, forward and backward: their configurations and
plans.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Plan, allocator, cdiv
from .._core.lazy import lazy_module
from ..common.launch import (
    BACKWARD_PROGRAMS_PER_SM,
    BackwardPlan,
    Gradients,
    Outputs,
    plan_add_chunks,
    plan_backward,
    plan_forward,
    plan_query_tiles,
    tile_launch,
)
from ..common.launch_sinks import plan_sinks
from ..common.problem import (
    HOPPER,
    Key,
    Problem,
    TileConfig,
    chunk_rows,
    key_of,
    problem_of,
    tile_config,
)
from .documents import count_tiles
from .launch_hopper import HopperPlan, hopper_config, plan_hopper
from .launch_hopper_backward import (
    HopperBackwardPlan,
    hopper_backward_config,
    plan_hopper_backward,
)

if TYPE_CHECKING:
    from . import kernels, kernels_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")

# Each table is read from the top; the first line that fits serves. The algorithms do not depend on
# it. Of a band no more than some tiles are seen, so small ones waste less at its borders. Source:
# results/tuning-h200-torch2.11-triton3.6.csv for the lines of heads of 64 and 40 columns in bf16;
# those of 40 serve a long band and a segment of TitanMAC. The others are unmeasured. Registers are
# spilled in fp32 by the forward pass of heads wider than 128, and a few where values have another
# width than keys.
FORWARD = (
    TileConfig(64, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=2, **HOPPER),
    TileConfig(16, 2, queries=64, keys=32, num_warps=4, num_stages=2),
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=64, keys=32, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=8, num_stages=2),
    TileConfig(256, 2, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
DQ = (
    TileConfig(64, 2, queries=64, keys=32, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=2, plain=True),
    TileConfig(64, 4, queries=32, keys=16, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 2, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
DKDV = (
    TileConfig(64, 2, queries=32, keys=64, num_warps=4, num_stages=2, plain=True),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2, plain=True),
    TileConfig(128, 2, queries=32, keys=64, num_warps=8, num_stages=2, whole=True),
    TileConfig(128, 2, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(16, 4, queries=16, keys=16, num_warps=4, num_stages=2),
    TileConfig(64, 4, queries=16, keys=32, num_warps=8, num_stages=2, plain=True),
    TileConfig(64, 4, queries=16, keys=32, num_warps=4, num_stages=2),
    TileConfig(128, 4, queries=16, keys=16, num_warps=4, num_stages=2),
    TileConfig(256, 2, queries=16, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)


class Band(NamedTuple):
    """Which keys the rows of one sequence see: all of a prefix, and a window of the others; a query
    is the last of ``every`` rows. Without ``documents`` the others are one, and there is no
    padding.
    """

    window: int
    prefix: int
    every: int = 1
    documents: int = 0

    @property
    def packed(self) -> bool:
        """Whether bounds say what a row sees."""
        return self.documents > 0


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor | None,
    sinks: torch.Tensor | None,
    band: Band,
    scale: float,
    with_lse: bool,
    keep: bool = True,
) -> Outputs:
    """Attention of ``q`` [B, Nq, H, D], the last rows of a sequence, to the keys of a band of ``k``
    and ``v`` [B, M, G, D], within the ``bounds`` [B, N + 1] of N documents (:mod:`.documents`), and
    to the ``sinks`` [H].

    Returns:
        ``(o, lse, softmax, o_low)`` as of :func:`plan_forward`: lse is None without ``with_lse``,
        softmax and o_low without ``keep``, o_low for fp32 too.
    """
    bounds, sinks, band = completed(bounds, sinks, band)
    plan = forward_plan(key_of((q, k, v), bounds, sinks), band, with_lse, keep)
    return plan.run((q, k, v, bounds, sinks), (scale,))


def attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor | None,
    sinks: torch.Tensor | None,
    o: torch.Tensor,
    o_low: torch.Tensor | None,
    softmax: torch.Tensor,
    band: Band,
    scale: float,
) -> Gradients:
    """Gradients ``(dq, dk, dv, dsinks)``, contiguous, from those of o and lse; dsinks is None
    without sinks.

    Args:
        do: gradient of o.
        dlse: gradient of lse, or None.
        q, k, v, bounds, sinks, band, scale: as in the forward pass.
        o, o_low, softmax: what the forward pass returned.
    """
    if dlse is not None:
        dlse = dlse.contiguous()
    bounds, sinks, band = completed(bounds, sinks, band)
    plan = backward_plan(key_of((do, q, k, v), dlse, bounds, sinks), band)
    return plan.run((do, q, k, v, dlse, bounds, sinks), (o, o_low, softmax), scale)


def completed(
    bounds: torch.Tensor | None, sinks: torch.Tensor | None, band: Band
) -> tuple[torch.Tensor | None, torch.Tensor | None, Band]:
    """Bounds and sinks as the kernels read them, and the band with the number of documents."""
    if bounds is not None:
        bounds, band = bounds.contiguous(), band._replace(documents=bounds.shape[1] - 1)
    return bounds, None if sinks is None else sinks.contiguous(), band


@functools.lru_cache(maxsize=4096)
def forward_plan(key: Key, band: Band, with_lse: bool, keep: bool) -> Plan | HopperPlan:
    """The plan for a call that reads q, k, v, bounds and sinks."""
    problem = problem_of(key, 3, integers_of(band, key))
    _, _, _, aligned, _, _ = key
    window = min(band.window, problem.keys)
    hopper = None if band.packed else hopper_config(problem, aligned, window, band.prefix)
    if hopper is not None:
        return plan_hopper(problem, hopper, window, with_lse, keep)
    launch = None
    if math.prod(problem.query_shape):
        kernel = kernels.window_forward_kernel
        config = tile_config(FORWARD, problem, band.packed)
        tiles = count_tiles(problem.queries, config.queries, band.documents)
        launch = plan_query_tiles(kernel, problem, config, tiles)
    return plan_forward(problem, launch, with_lse, keep)


@functools.lru_cache(maxsize=4096)
def backward_plan(key: Key, band: Band) -> BackwardPlan | HopperBackwardPlan:
    """The plan for a call that reads do, q, k, v, dlse, bounds and sinks."""
    problem = problem_of(key, 4, integers_of(band, key))
    if not (math.prod(problem.query_shape) and problem.keys):
        return plan_backward(problem)
    _, _, _, aligned, _, _ = key
    window = min(band.window, problem.keys)
    hopper = None if band.packed else hopper_backward_config(problem, aligned, window, band.prefix)
    if hopper is not None:
        return plan_hopper_backward(problem, hopper, window)
    return plan_launches(problem, band)


def integers_of(band: Band, key: Key) -> tuple[int, ...]:
    """What the kernels take of a band."""
    _, (_, keys, *_), *_ = key
    # No row sees further back than to the first key.
    return min(band.window, keys), band.prefix, band.every, band.documents


def plan_launches(problem: Problem, band: Band) -> BackwardPlan:
    """The gradients of a prefix come as partial sums; without one, none are written."""
    prefix = band.prefix
    config, of_dq = (tile_config(table, problem, band.packed) for table in (DKDV, DQ))
    prefix_tiles = cdiv(prefix, config.keys)
    programs = BACKWARD_PROGRAMS_PER_SM * problem.gpu.multiprocessors
    tiles_of_all = problem.all_key_heads * max(prefix_tiles, 1)
    chunk = chunk_rows(tiles_of_all, problem.queries, config.queries, programs)
    chunks = cdiv(problem.queries, chunk)
    key_tiles = count_tiles(problem.keys - prefix, config.keys, band.documents)
    query_tiles = count_tiles(problem.queries, of_dq.queries, band.documents)
    sums = plan_add_chunks(problem, chunks, prefix) if prefix else {}
    return plan_backward(
        problem,
        plan_query_tiles(kernels_backward.window_dq_kernel, problem, of_dq, query_tiles),
        **sums,
        launch_dkdv=tile_launch(
            kernels_backward.window_dkdv_kernel,
            problem,
            config,
            problem.all_key_heads * (prefix_tiles * chunks + key_tiles),
            (problem.all_heads * problem.queries, problem.batches, chunk),
        ),
        delta=allocator(problem.rows, torch.float32, problem.device),
        sums_beside=True,
        sinks=plan_sinks(problem, query_tiles),
    )
