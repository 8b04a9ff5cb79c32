"""The launch of the forward pass of rectangular_attention: its configurations and its plan."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import DeviceProperties
from .._core.launches import Launch, Plan, cdiv
from .._core.lazy import lazy_module
from ..common.launch import Outputs, plan_forward, plan_query_tiles, tile_launch
from ..common.problem import (
    HOPPER,
    Key,
    Problem,
    TileConfig,
    chunk_rows,
    key_of,
    on_hopper,
    problem_of,
    tile_config,
    tile_rows,
)
from .launch_hopper import HopperPlan, hopper_config, plan_hopper
from .launch_hopper_single_tile import (
    HopperSingleTilePlan,
    hopper_single_tile_config,
    plan_hopper_single_tile,
)

if TYPE_CHECKING:
    from . import kernels_single_tile, kernels_streaming
else:
    kernels_single_tile = lazy_module(__package__, "kernels_single_tile")
    kernels_streaming = lazy_module(__package__, "kernels_streaming")

# This many keys of a head are one tile, if it fits this often in the shared memory of a GPU.
SINGLE_TILE_KEYS = 128
SINGLE_TILE_FITS = 8


class SingleTileConfig(NamedTuple):
    """Serves up to ``max_keys`` keys of heads up to ``max_width`` of numbers up to ``max_bytes``,
    ``queries`` rows at a time; ``hopper`` and ``plain`` as in a TileConfig.
    """

    max_keys: int
    max_width: int
    max_bytes: int
    queries: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    plain: bool = False


# Each table is read from the top; the first line that fits serves. The algorithms do not depend on
# it. Source: results/tuning-h200-torch2.11-triton3.6.csv for the lines for Hopper, heads of 32, 64
# and 128 columns in bf16, and docs/decisions/0004; the others are unmeasured.
FORWARD = (
    TileConfig(32, 2, queries=64, keys=64, num_warps=4, num_stages=3, **HOPPER),
    TileConfig(128, 2, queries=128, keys=64, num_warps=8, num_stages=3, **HOPPER),
    TileConfig(64, 2, queries=128, keys=64, num_warps=8, num_stages=3),
    TileConfig(128, 2, queries=64, keys=64, num_warps=8, num_stages=2),
    TileConfig(128, 4, queries=32, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 2, queries=64, keys=32, num_warps=8, num_stages=2),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=2),
)
SINGLE_TILE_FORWARD = (
    SingleTileConfig(128, 64, 2, queries=64, num_warps=4, num_stages=3),
    SingleTileConfig(128, 128, 2, queries=32, num_warps=4, num_stages=2),
    SingleTileConfig(128, 128, 4, queries=16, num_warps=8, num_stages=2),
    SingleTileConfig(128, 256, 2, queries=16, num_warps=4, num_stages=2),
    SingleTileConfig(128, 256, 4, queries=16, num_warps=8, num_stages=2),
)
# Where tasks and heads are fewer programs than so many for each multiprocessor, the queries of each
# are cut into chunks. Unmeasured.
FORWARD_PROGRAMS_PER_SM = 8


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    with_lse: bool,
    keep: bool = True,
) -> Outputs:
    """Attention of ``q`` [B, Nq, H, D] to every key that a task has of ``k`` and ``v``
    [B, M, G, D], and to the ``sinks`` [H].

    Returns:
        ``(o, lse, softmax, o_low)`` as of :func:`plan_forward`: lse is None without ``with_lse``,
        softmax and o_low without ``keep`` and where keys are one tile, o_low for fp32 too.
    """
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    if sinks is not None:
        sinks = sinks.contiguous()
    plan = forward_plan(key_of((q, k, v), key_lengths, sinks), with_lse, keep)
    return plan.run((q, k, v, key_lengths, sinks), (scale,))


@functools.lru_cache(maxsize=4096)
def forward_plan(key: Key, with_lse: bool, keep: bool) -> Plan | HopperPlan | HopperSingleTilePlan:
    """The plan for a call that reads q, k, v, key_lengths and sinks."""
    problem = problem_of(key, 3)
    single = in_single_tile(problem)
    _, _, (*_, of_lengths, _), aligned, _, _ = key
    ragged = of_lengths is not None
    if single:
        line = hopper_single_tile_config(problem, aligned)
        if line is not None:
            return plan_hopper_single_tile(problem, line, ragged, with_lse)
    elif (hopper := hopper_config(problem, aligned, ragged)) is not None:
        return plan_hopper(problem, hopper, ragged, with_lse, keep)
    launch = None
    if math.prod(problem.query_shape):
        if single:
            launch = plan_single_tile(problem)
        else:
            kernel = kernels_streaming.streaming_forward_kernel
            launch = plan_query_tiles(kernel, problem, tile_config(FORWARD, problem))
    return plan_forward(problem, launch, with_lse, keep and not single)


def plan_single_tile(problem: Problem) -> Launch:
    """One program for every chunk of queries of every head."""
    config = single_tile_config(SINGLE_TILE_FORWARD, problem)
    programs = FORWARD_PROGRAMS_PER_SM * problem.gpu.multiprocessors
    chunk = chunk_rows(problem.all_heads, problem.queries, config.queries, programs)
    return tile_launch(
        kernels_single_tile.single_tile_forward_kernel,
        problem,
        config,
        problem.all_heads * cdiv(problem.queries, chunk),
        (chunk,),
    )


def single_tile_config(table: tuple[SingleTileConfig, ...], problem: Problem) -> TileConfig:
    """The first line of a table that serves this many keys of heads of this width, with all keys in
    a tile.
    """
    line = next(
        line
        for line in table
        if problem.keys <= line.max_keys
        and problem.widest <= line.max_width
        and problem.dtype.itemsize <= line.max_bytes
        and (on_hopper(problem) or not line.hopper)
        and (problem.plain or not line.plain)
    )
    return TileConfig(
        line.max_width,
        line.max_bytes,
        queries=line.queries,
        keys=tile_rows(problem.keys),
        num_warps=line.num_warps,
        num_stages=line.num_stages,
    )


def in_single_tile(problem: Problem) -> bool:
    """Whether all keys of a head are one tile."""
    return is_single_tile(problem.keys, problem.widest, problem.dtype.itemsize, problem.gpu)


def is_single_tile(keys: int, width: int, itemsize: int, gpu: DeviceProperties) -> bool:
    """The same of this many keys of heads of this width."""
    # A comparison is all that is asked of the keys: when torch.compile traces shapes that vary,
    # their number is a symbol.
    fitting = gpu.shared_bytes // (SINGLE_TILE_FITS * tile_rows(width) * itemsize)
    return keys <= min(SINGLE_TILE_KEYS, 1 << (max(fitting, 1).bit_length() - 1))
