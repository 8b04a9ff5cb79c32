"""The launches of the backward pass over many keys on Hopper: what it reads, warp groups that copy,
multiply and add, parts of the last tiles, and the rounding of dq.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import (
    Allocator,
    DescribedLaunch,
    Launch,
    allocate,
    allocator,
    cdiv,
    contiguous_where,
)
from .._core.lazy import lazy_module
from ..common.launch import Gradients, grid_of
from ..common.launch_hopper import (
    hopper_line,
    in_statistics,
    in_tiles,
    in_tiles_of_dq,
    plan_prepare,
    plan_round_dq,
)
from ..common.launch_sinks import SinksPlan, plan_sinks
from ..common.problem import Problem
from .launch_hopper import parts_of

if TYPE_CHECKING:
    from . import kernels_combine, kernels_hopper_backward
else:
    kernels_combine = lazy_module(__package__, "kernels_combine")
    kernels_hopper_backward = lazy_module(__package__, "kernels_hopper_backward")

# Queries of a tile, keys of a piece of work and of a group of warps, columns of a tile of dq.
QUERIES, KEYS, ROWS, COLUMNS = 64, 128, 64, 64


class HopperBackwardConfig(NamedTuple):
    """Serves heads of ``width`` and calls of ``fewest_scores`` scores and more, which fill the GPU:
    blocks of ``tiles`` tiles of queries, ``gap`` of which lie between two programs; rings of
    ``stages`` tiles of queries and of ``ds_stages`` tiles of ds, and ``places`` for tiles of dq; so
    many registers a thread of a group with keys, of the one for dq, and of the warps that copy and
    add. ``dq_registers`` is None where the groups with keys make dq, and keys and values stay in
    shared memory.
    """

    width: int
    fewest_scores: int
    tiles: int
    gap: int
    stages: int
    ds_stages: int
    places: int
    registers: int
    dq_registers: int | None
    copying_registers: int


class HopperBackwardConstants(NamedTuple):
    """What the kernels are compiled for, read as ``CONFIG``: sizes of tiles, those of a
    HopperBackwardConfig, whether heads share keys, whether tasks have numbers of keys of their own,
    and whether keys and values stay in registers.
    """

    D: int
    BLOCK_D: int
    KEYS: int
    ROWS: int
    TILES: int
    STRIPES: int
    GAP: int
    STAGES: int
    DS_STAGES: int
    PLACES: int
    REGISTERS: int
    DQ_REGISTERS: int | None
    COPYING_REGISTERS: int
    GROUPED: bool
    RAGGED: bool
    IN_REGISTERS: bool


# What a piece of work takes beside its blocks of queries, in blocks. Unmeasured.
BLOCKS_OF_A_PIECE = 1
# Tiles of sums of dq that are written and read in the time of one block, by 4.25 TB/s.
TILES_IN_A_BLOCK = 330
# What stripes may take of the time in which all programs always work.
HARDLY_MORE = 1.05


# Source: docs/decisions/0018-orders-h200.csv, 0018-hopper-h200.csv and, for 128 columns,
# 0018-wide-h200.csv.
HOPPER_BACKWARD = (
    HopperBackwardConfig(
        *(64, 1 << 27),
        tiles=2,
        gap=2,
        stages=2,
        ds_stages=3,
        places=4,
        registers=192,
        dq_registers=104,
        copying_registers=24,
    ),
    HopperBackwardConfig(
        *(128, 1 << 27),
        tiles=2,
        gap=2,
        stages=2,
        ds_stages=2,
        places=4,
        registers=240,
        dq_registers=None,
        copying_registers=24,
    ),
)


class HopperBackwardPlan(NamedTuple):
    """One backward pass: which operands it copies first; the allocators of dq, dk and dv, of the
    sums of dq, of the log-sum-exp and delta, of the counters, and of parts of dk and dv, None
    without; and its launches.
    """

    copies: tuple[bool, ...]
    gradients: tuple[Allocator, Allocator, Allocator]
    sums: Allocator
    statistics: Allocator
    counters: Allocator
    partial: Allocator | None
    prepare: Launch
    launch: Launch
    add_parts: Launch | None
    round_dq: Launch
    sinks: SinksPlan | None

    def run(
        self,
        operands: tuple[torch.Tensor | None, ...],
        saved: tuple[torch.Tensor | None, ...],
        scale: float,
    ) -> Gradients:
        """Allocate and launch; the arguments are those of ``BackwardPlan.run``."""
        if self.copies:
            operands = contiguous_where(operands, self.copies)
        do, q, k, v, dlse, key_lengths, sinks = operands
        dq, dk, dv = (make() for make in self.gradients)
        sums, lse, delta = self.sums(), self.statistics(), self.statistics()
        counters, partial = self.counters(), allocate(self.partial)
        dsinks = None if self.sinks is None else self.sinks.partial()
        self.prepare((do, *saved, dlse, sinks, lse, delta, counters, dsinks))
        # A kernel takes no absent pointer here; what stands in is not touched.
        parts = counters.view(torch.float32) if partial is None else partial
        lengths = counters if key_lengths is None else key_lengths
        self.launch((q, k, v, do, dk, dv, lse, delta, sums, lengths, counters, parts), (scale,))
        if self.add_parts is not None:
            self.add_parts((partial, dk, dv))
        self.round_dq((sums, key_lengths, dq), (scale,))
        return dq, dk, dv, None if self.sinks is None else self.sinks.add(dsinks)


def hopper_backward_config(problem: Problem, aligned: bool) -> HopperBackwardConfig | None:
    """The line that serves a call; None where another kernel does. ``aligned``: whether a
    descriptor may start where each operand does.
    """
    # Rows of sums of dq are counted by 32-bit numbers.
    parts = problem.width // COLUMNS
    if problem.all_heads * cdiv(problem.queries, QUERIES) * QUERIES * parts >= 2**31:
        return None
    scores = problem.all_heads * problem.queries * problem.keys
    return hopper_line(HOPPER_BACKWARD, problem, aligned, scores)


class Stripes(NamedTuple):
    """How keys are shared among programs: the ranges of the keys of a head, which have sums of dq
    of their own, such a range being a stripe; its tiles of keys, the last of which may be past the
    last key; how many stripes lie side by side, and on how many programs.
    """

    ranges: int
    key_tiles: int
    side: int
    programs: int


def stripes_of(problem: Problem, config: HopperBackwardConfig, ragged: bool) -> Stripes:
    """The stripes of a call, at each of which are no more programs than it has blocks of queries,
    so that they hardly wait: of as few ranges as leave programs little without work, or else those
    that take the least time. With ``ragged`` tasks that are longer than a round of all programs,
    all heads of a task lie side by side: its pieces without keys are then one stretch, which
    programs pass at one time.
    """
    gpu_programs, heads = problem.gpu.multiprocessors, problem.all_key_heads
    query_tiles = problem.group * cdiv(problem.queries, QUERIES)
    all_key_tiles = cdiv(problem.keys, KEYS)
    blocks = cdiv(query_tiles, config.tiles)
    of_piece = blocks + BLOCKS_OF_A_PIECE
    at_best = heads * (all_key_tiles * of_piece / gpu_programs + query_tiles / TILES_IN_A_BLOCK)
    many = all_key_tiles * problem.key_heads > gpu_programs >= problem.key_heads
    step = problem.key_heads if ragged and many else 1
    best, least = None, math.inf
    # Sums of dq take no more memory than the gradients of keys and values.
    most = min(gpu_programs, cdiv(problem.keys, query_tiles * QUERIES))
    for ranges in range(1, most + 1):
        key_tiles = cdiv(all_key_tiles, ranges)
        stripes = heads * ranges
        # Stripes side by side are a divisor of all of them, and of the programs.
        for side in range(step, min(stripes, gpu_programs) + 1, step):
            programs = gpu_programs // side * side
            if stripes % side or min(programs // side, key_tiles) > blocks:
                continue
            whole, parts = parts_of(stripes * key_tiles, blocks, programs, rounds=1)
            time = stripes * query_tiles / TILES_IN_A_BLOCK + cdiv(whole, programs) * of_piece
            if whole < stripes * key_tiles:
                time += cdiv(blocks, parts) + BLOCKS_OF_A_PIECE
            if time < least:
                best, least = Stripes(ranges, key_tiles, side, programs), time
        if least <= HARDLY_MORE * at_best:
            break
    assert best is not None, "as many ranges as there may be have no more keys than queries"
    return best


def plan_hopper_backward(
    problem: Problem, config: HopperBackwardConfig, ragged: bool
) -> HopperBackwardPlan:
    """The plan of a call that a line serves; ``ragged``: with key_lengths. Of heads that share
    keys, the queries are those of one head for the kernel that multiplies.
    """
    device, heads, width = problem.device, problem.all_key_heads, problem.width
    ranges, key_tiles, side, programs = stripes_of(problem, config, ragged)
    of_head = cdiv(problem.queries, QUERIES)
    query_tiles = problem.group * of_head
    blocks = cdiv(query_tiles, config.tiles)
    tiles = heads * ranges * key_tiles
    # In one round: more would not come to a block in the order of their places.
    whole, parts = parts_of(tiles, blocks, programs, rounds=1)
    left = tiles - whole
    programs = min(programs, whole + left * parts)
    constants = HopperBackwardConstants(
        D=width,
        BLOCK_D=width,
        KEYS=KEYS,
        ROWS=ROWS,
        TILES=config.tiles,
        STRIPES=side,
        GAP=config.gap,
        STAGES=config.stages,
        DS_STAGES=config.ds_stages,
        PLACES=config.places,
        REGISTERS=config.registers,
        DQ_REGISTERS=config.dq_registers,
        COPYING_REGISTERS=config.copying_registers,
        GROUPED=problem.group > 1,
        RAGGED=ragged,
        IN_REGISTERS=config.dq_registers is not None,
    )
    launch = DescribedLaunch(
        kernels_hopper_backward.hopper_backward_kernel,
        (programs,),
        device,
        (
            *(problem.keys, problem.key_heads, whole, parts, whole + left * parts),
            *(query_tiles, key_tiles, ranges, problem.group),
        ),
        dict(num_warps=4, launch_cooperative_grid=True),
        CONFIG=constants,
    )
    key_rows = KEYS if constants.IN_REGISTERS else ROWS
    launch.descriptors = (
        *map(in_tiles, (QUERIES, key_rows, key_rows, QUERIES, ROWS, ROWS)),
        *(in_statistics, in_statistics, in_tiles_of_dq),
    )
    prepare = plan_prepare(problem, of_head, blocks, ranges, constants)
    round_dq = plan_round_dq(problem, of_head, key_tiles, ranges, constants)
    add_parts = None
    if left:
        add_parts = Launch(
            kernels_combine.add_parts_kernel,
            grid_of(left * 2 * (KEYS // ROWS)),
            device,
            (whole, parts, problem.keys, problem.key_heads, key_tiles, ranges),
            dict(num_warps=4),
            CONFIG=constants,
        )
    queries = query_tiles * QUERIES
    sums = heads * ranges * queries * (width // COLUMNS), COLUMNS
    shapes = problem.query_shape, problem.key_shape, problem.key_shape
    dq, dk, dv = (allocator(shape, problem.dtype, device) for shape in shapes)
    return HopperBackwardPlan(
        problem.copies,
        (dq, dk, dv),
        allocator(sums, torch.float32, device),
        allocator((heads, queries), torch.float32, device),
        allocator((heads * ranges, blocks), torch.int32, device),
        allocator((left * parts, 2, KEYS, width), torch.float32, device) if left else None,
        prepare,
        launch,
        add_parts,
        round_dq,
        plan_sinks(problem, of_head),
    )
