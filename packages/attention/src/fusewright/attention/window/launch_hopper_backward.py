"""The launches of the backward pass of sliding_window_attention on Hopper: what it reads, and warp
groups that copy, multiply and add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, DescribedLaunch, Launch, allocator, cdiv
from .._core.lazy import lazy_module
from ..common.launch import Gradients
from ..common.launch_hopper import (
    in_statistics,
    in_tiles,
    in_tiles_of_dq,
    plan_prepare,
)
from ..common.problem import Problem
from .launch_hopper import window_line

if TYPE_CHECKING:
    from . import kernels_hopper_backward
else:
    kernels_hopper_backward = lazy_module(__package__, "kernels_hopper_backward")

# Queries of a tile, keys of a piece of work and of a group of warps, tiles of a block.
QUERIES, KEYS, ROWS, TILES = 64, 128, 64, 2


class HopperBackwardConfig(NamedTuple):
    """Serves heads of ``width`` and calls of ``fewest_scores`` scores and more: rings of ``stages``
    tiles of queries and, for each group, of ``ds_stages`` tiles of ds, and ``places`` for tiles of
    dq; so many registers a thread of a group with keys, of the one for dq, and of the warps that
    copy and add.
    """

    width: int
    fewest_scores: int
    stages: int
    ds_stages: int
    places: int
    registers: int
    dq_registers: int
    copying_registers: int


class HopperBackwardConstants(NamedTuple):
    """What the kernels are compiled for, read as ``CONFIG``: sizes of tiles and those of a
    HopperBackwardConfig.
    """

    D: int
    BLOCK_D: int
    KEYS: int
    TILES: int
    STAGES: int
    DS_STAGES: int
    PLACES: int
    REGISTERS: int
    DQ_REGISTERS: int
    COPYING_REGISTERS: int


# Source: docs/decisions/0020-window-h200.csv.
HOPPER_BACKWARD = (
    HopperBackwardConfig(
        *(64, 1 << 25),
        stages=3,
        ds_stages=2,
        places=4,
        registers=192,
        dq_registers=96,
        copying_registers=24,
    ),
)


class HopperBackwardPlan(NamedTuple):
    """One backward pass: the allocators of dq, dk and dv, of the sums of dq, of the log-sum-exp and
    delta, and of the counters; and its launches.
    """

    gradients: tuple[Allocator, Allocator, Allocator]
    sums: Allocator
    statistics: Allocator
    counters: Allocator
    prepare: Launch
    launch: Launch

    def run(
        self,
        operands: tuple[torch.Tensor | None, ...],
        saved: tuple[torch.Tensor | None, ...],
        scale: float,
    ) -> Gradients:
        """Allocate and launch; the arguments are those of ``BackwardPlan.run``."""
        do, q, k, v, dlse, *_ = operands
        dq, dk, dv = (make() for make in self.gradients)
        sums, lse, delta = self.sums(), self.statistics(), self.statistics()
        counters = self.counters()
        # There are neither bounds nor sinks.
        self.prepare((do, *saved, dlse, None, lse, delta, counters, None))
        self.launch((q, k, v, do, dk, dv, dq, lse, delta, sums, sums, counters), (scale,))
        return dq, dk, dv, None


def hopper_backward_config(
    problem: Problem, aligned: bool, window: int, prefix: int
) -> HopperBackwardConfig | None:
    """The line that serves a call, as ``window_line`` says."""
    # Rows of sums of dq are counted by 32-bit numbers.
    if problem.all_heads * cdiv(problem.queries, QUERIES) * QUERIES >= 2**31:
        return None
    return window_line(HOPPER_BACKWARD, problem, aligned, window, prefix)


def plan_hopper_backward(
    problem: Problem, config: HopperBackwardConfig, window: int
) -> HopperBackwardPlan:
    """The plan of a call that a line serves."""
    device, heads, width = problem.device, problem.all_heads, problem.width
    query_tiles, key_tiles = cdiv(problem.queries, QUERIES), cdiv(problem.keys, KEYS)
    blocks = cdiv(query_tiles, TILES)
    pieces = heads * key_tiles
    constants = HopperBackwardConstants(
        D=width,
        BLOCK_D=width,
        KEYS=KEYS,
        TILES=TILES,
        STAGES=config.stages,
        DS_STAGES=config.ds_stages,
        PLACES=config.places,
        REGISTERS=config.registers,
        DQ_REGISTERS=config.dq_registers,
        COPYING_REGISTERS=config.copying_registers,
    )
    launch = DescribedLaunch(
        kernels_hopper_backward.window_hopper_backward_kernel,
        (min(problem.gpu.multiprocessors, pieces),),
        device,
        (pieces, problem.heads, query_tiles, key_tiles, window),
        dict(num_warps=4, launch_cooperative_grid=True),
        CONFIG=constants,
    )
    launch.descriptors = (
        *map(in_tiles, (QUERIES, KEYS, KEYS, QUERIES, ROWS, ROWS, QUERIES)),
        *(in_statistics, in_statistics, in_tiles_of_dq),
    )
    prepare = plan_prepare(problem, query_tiles, blocks, 1, constants)
    queries = query_tiles * QUERIES
    shapes = problem.query_shape, problem.key_shape, problem.key_shape
    dq, dk, dv = (allocator(shape, problem.dtype, device) for shape in shapes)
    return HopperBackwardPlan(
        (dq, dk, dv),
        allocator((heads * queries, width), torch.float32, device),
        allocator((heads, queries), torch.float32, device),
        allocator((heads, blocks), torch.int32, device),
        prepare,
        launch,
    )
