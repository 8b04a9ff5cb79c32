"""The launches of both passes over few keys on Hopper: warp groups that copy and multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, DescribedLaunch, allocate, allocator, cdiv
from .._core.lazy import lazy_module
from ..common.launch import Gradients, Outputs
from ..common.launch_hopper import hopper_line, in_tiles
from ..common.problem import Problem, tile_rows

if TYPE_CHECKING:
    from . import kernels_hopper_single_tile, kernels_hopper_single_tile_backward
else:
    kernels_hopper_single_tile = lazy_module(__package__, "kernels_hopper_single_tile")
    kernels_hopper_single_tile_backward = lazy_module(
        __package__, "kernels_hopper_single_tile_backward"
    )

# Queries of a tile.
ROWS = 64


class HopperSingleTileConfig(NamedTuple):
    """Serves ``min_keys`` to ``max_keys`` keys of heads of ``width`` and calls of ``fewest_scores``
    scores and more, keys counted in whole tiles: so many ``groups`` of warps with queries, rings of
    ``stages`` tiles of queries and ``key_stages`` of keys, and so many registers a thread that
    multiplies and that copies; in a backward pass, ``places`` for tiles of scores on their way to
    the group that sums, and its ``sum_registers``.
    """

    min_keys: int
    max_keys: int
    width: int
    fewest_scores: int
    groups: int
    stages: int
    key_stages: int
    registers: int
    copying_registers: int
    places: int = 0
    sum_registers: int = 0


class HopperSingleTileConstants(NamedTuple):
    """What a kernel is compiled for, read as ``CONFIG``: sizes of tiles and those of a
    HopperSingleTileConfig; RAGGED: whether tasks have numbers of keys of their own; MASKED: whether
    the tile may have columns that are no keys; BACKWARD: whether do is copied, too; LSE and DLSE:
    whether lse is written and its gradient read.
    """

    D: int
    BLOCK_K: int
    GROUPS: int
    STAGES: int
    KEY_STAGES: int
    PLACES: int
    REGISTERS: int
    SUM_REGISTERS: int
    COPYING_REGISTERS: int
    RAGGED: bool
    MASKED: bool
    BACKWARD: bool
    LSE: bool
    DLSE: bool


# Source: docs/decisions/0004-hopper-h200.csv. Of up to 64 keys the kernel in plain Triton is faster
# where tasks are many.
HOPPER_SINGLE_TILE_FORWARD = (
    HopperSingleTileConfig(
        *(65, 128, 64, 1 << 23),
        groups=3,
        stages=10,
        key_stages=2,
        registers=160,
        copying_registers=24,
    ),
)
HOPPER_SINGLE_TILE_BACKWARD = (
    HopperSingleTileConfig(
        *(1, 64, 64, 1 << 22),
        groups=2,
        stages=8,
        key_stages=2,
        places=3,
        registers=184,
        sum_registers=112,
        copying_registers=24,
    ),
    HopperSingleTileConfig(
        *(65, 128, 64, 1 << 22),
        groups=1,
        stages=5,
        key_stages=2,
        places=2,
        registers=256,
        sum_registers=184,
        copying_registers=24,
    ),
)


class HopperSingleTilePlan(NamedTuple):
    """One forward pass: the allocators of o and of lse, None where there is none, and its
    launch.
    """

    o: Allocator
    lse: Allocator | None
    launch: DescribedLaunch

    def run(self, operands: tuple[torch.Tensor | None, ...], floats: tuple[float, ...]) -> Outputs:
        """Allocate and launch; ``operands`` are q, k, v, key_lengths and absent sinks."""
        q, k, v, lengths, _ = operands
        o, lse = self.o(), allocate(self.lse)
        # A kernel takes no absent pointer here; what stands in is not touched.
        pointers = [o if x is None else x for x in (lengths, lse)]
        self.launch((q, k, v, o, *pointers), floats)
        return o, lse, None, None


class HopperSingleTileBackwardPlan(NamedTuple):
    """One backward pass: the allocators of dq, dk and dv, and its launch."""

    gradients: tuple[Allocator, Allocator, Allocator]
    launch: DescribedLaunch

    def run(
        self,
        operands: tuple[torch.Tensor | None, ...],
        saved: tuple[torch.Tensor | None, ...],
        scale: float,
    ) -> Gradients:
        """Allocate and launch; the arguments are those of ``BackwardPlan.run``."""
        do, q, k, v, dlse, lengths, _ = operands
        dq, dk, dv = (make() for make in self.gradients)
        pointers = [dq if x is None else x for x in (lengths, dlse)]
        self.launch((q, k, v, do, dq, dk, dv, *pointers), (scale,))
        return dq, dk, dv, None


def hopper_single_tile_config(
    problem: Problem, aligned: bool, backward: bool = False
) -> HopperSingleTileConfig | None:
    """The line that serves a pass; None where another kernel does. ``aligned``: whether a
    descriptor may start where each operand does.
    """
    if any(problem.copies) or not problem.plain:
        return None
    if not (problem.all_heads and problem.queries and problem.keys):
        return None
    scores = problem.all_heads * problem.queries * tile_rows(problem.keys)
    table = HOPPER_SINGLE_TILE_BACKWARD if backward else HOPPER_SINGLE_TILE_FORWARD
    for line in table:
        if line.min_keys <= problem.keys <= line.max_keys:
            return hopper_line((line,), problem, aligned, scores)
    return None


def constants_of(
    problem: Problem, config: HopperSingleTileConfig, backward: bool, ragged: bool, of_lse: bool
) -> HopperSingleTileConstants:
    """What a kernel is compiled for; ``of_lse``: whether there is lse, or its gradient."""
    block = tile_rows(problem.keys)
    return HopperSingleTileConstants(
        D=problem.width,
        BLOCK_K=block,
        GROUPS=config.groups,
        STAGES=config.stages,
        KEY_STAGES=config.key_stages,
        PLACES=config.places,
        REGISTERS=config.registers,
        SUM_REGISTERS=config.sum_registers,
        COPYING_REGISTERS=config.copying_registers,
        RAGGED=ragged,
        MASKED=ragged or problem.keys < block,
        BACKWARD=backward,
        LSE=of_lse and not backward,
        DLSE=of_lse and backward,
    )


def shares(heads: int, query_tiles: int, programs: int, whole: bool) -> tuple[int, int, int]:
    """The rounds in which all programs take a whole head, the tiles that are left, and how many of
    these, next to one another, a program takes; with ``whole``, all of a head.
    """
    rounds, left = divmod(heads, programs)
    left *= query_tiles
    return rounds, left, query_tiles if whole else cdiv(left, programs)


def plan_hopper_single_tile(
    problem: Problem, config: HopperSingleTileConfig, ragged: bool, with_lse: bool
) -> HopperSingleTilePlan:
    """The plan of a forward pass that a line serves; ``ragged``: with key_lengths."""
    tiles, block = cdiv(problem.queries, ROWS), tile_rows(problem.keys)
    programs = min(problem.gpu.multiprocessors, problem.all_heads * tiles)
    launch = DescribedLaunch(
        kernels_hopper_single_tile.hopper_single_tile_forward_kernel,
        (programs,),
        problem.device,
        (
            *(problem.queries, problem.keys, problem.heads),
            *shares(problem.all_heads, tiles, programs, whole=False),
            tiles,
        ),
        dict(num_warps=4),
        CONFIG=constants_of(problem, config, False, ragged, with_lse),
    )
    launch.descriptors = tuple(map(in_tiles, (ROWS, block, block, ROWS)))
    return HopperSingleTilePlan(
        allocator(problem.query_shape, problem.dtype, problem.device),
        allocator(problem.rows, torch.float32, problem.device) if with_lse else None,
        launch,
    )


def plan_hopper_single_tile_backward(
    problem: Problem, config: HopperSingleTileConfig, ragged: bool, with_dlse: bool
) -> HopperSingleTileBackwardPlan:
    """The plan of a backward pass that a line serves; ``ragged``: with key_lengths."""
    tiles, block = cdiv(problem.queries, ROWS), tile_rows(problem.keys)
    programs = min(problem.gpu.multiprocessors, problem.all_heads)
    launch = DescribedLaunch(
        kernels_hopper_single_tile_backward.hopper_single_tile_backward_kernel,
        (programs,),
        problem.device,
        (
            *(problem.queries, problem.keys, problem.heads),
            *shares(problem.all_heads, tiles, programs, whole=True),
            tiles,
        ),
        dict(num_warps=4),
        CONFIG=constants_of(problem, config, True, ragged, with_dlse),
    )
    rows = (ROWS, block, block, ROWS, ROWS, block, block)
    launch.descriptors = tuple(map(in_tiles, rows))
    shapes = problem.query_shape, problem.key_shape, problem.value_shape
    dq, dk, dv = (allocator(shape, problem.dtype, problem.device) for shape in shapes)
    return HopperSingleTileBackwardPlan((dq, dk, dv), launch)
