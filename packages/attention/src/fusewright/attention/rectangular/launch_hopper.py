"""The launches of the forward pass over many keys on Hopper: warp groups that copy and multiply,
parts of the last tiles, and the tiles that are computed again.
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
)
from .._core.lazy import lazy_module
from ..common.launch import Outputs, plan_query_tiles
from ..common.launch_hopper import hopper_line, in_tiles
from ..common.problem import Problem, TileConfig

if TYPE_CHECKING:
    from . import kernels_combine, kernels_hopper, kernels_streaming
else:
    kernels_combine = lazy_module(__package__, "kernels_combine")
    kernels_hopper = lazy_module(__package__, "kernels_hopper")
    kernels_streaming = lazy_module(__package__, "kernels_streaming")

# Queries of a group of warps.
ROWS = 64


# What a piece of work takes beside its steps, in steps. Unmeasured.
STEPS_OF_A_PIECE = 3
# Keys and values of a head of this many bytes do not stay in the L2 cache.
BEYOND_CACHE = 1 << 24


# With fewer keys, of which tasks have parts, programs stay too little at a piece. Source:
# docs/decisions/0017-ragged-h200.csv.
FEWEST_RAGGED = 2048


class HopperConfig(NamedTuple):
    """Serves heads of ``width`` and calls of ``fewest_scores`` scores and more, which fill the GPU:
    so many groups of warps with queries, tiles of ``keys`` rows in a ring of ``stages``, so many
    registers a thread that multiplies and that copies.
    """

    width: int
    fewest_scores: int
    groups: int
    keys: int
    stages: int
    registers: int
    copying_registers: int


class HopperConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``; GROUPED: whether heads share keys;
    RAGGED: whether tasks have numbers of keys of their own; SINKS: whether heads have sinks; LSE:
    whether it writes lse; TOGETHER: whether programs begin their pieces at one time.
    """

    D: int
    GROUPS: int
    BLOCK_K: int
    STAGES: int
    REGISTERS: int
    COPYING_REGISTERS: int
    GROUPED: bool
    RAGGED: bool
    SINKS: bool
    LSE: bool
    TOGETHER: bool


# Source: docs/decisions/0017-hopper-forward-h200.csv and, for 128 columns, 0017-more-h200.csv.
HOPPER_FORWARD = (
    HopperConfig(64, 1 << 27, groups=3, keys=128, stages=4, registers=160, copying_registers=24),
    HopperConfig(128, 1 << 27, groups=2, keys=64, stages=4, registers=240, copying_registers=24),
)
# What computes flagged tiles again, as many queries a program as a group has.
AGAIN = TileConfig(64, 2, queries=ROWS, keys=64, num_warps=4, num_stages=3)


class HopperPlan(NamedTuple):
    """One forward pass: the allocators of o, lse, softmax and o_low, of flags, of the parts' o and
    statistics, None without parts, and of the counter of pieces, None where programs do not begin
    them at one time; and its launches.
    """

    outputs: tuple[Allocator | None, ...]
    flags: Allocator
    partial_o: Allocator | None
    partial_softmax: Allocator | None
    begun: Allocator | None
    launch: Launch
    combine: Launch | None
    again: Launch

    def run(self, operands: tuple[torch.Tensor | None, ...], floats: tuple[float, ...]) -> Outputs:
        """Allocate and launch; ``operands`` are q, k, v, key_lengths and sinks."""
        q, k, v, key_lengths, sinks = operands
        o, lse, softmax, o_low = outputs = tuple(allocate(each) for each in self.outputs)
        flags = self.flags()
        partial_o, partial_softmax = allocate(self.partial_o), allocate(self.partial_softmax)
        begun = None if self.begun is None else self.begun().zero_()
        # A kernel takes no absent descriptor or pointer here; what stands in is not touched, and
        # has the dtype, so that one compilation serves.
        unused = flags.view(torch.float32)
        numbers = [unused if x is None else x for x in (sinks, lse, softmax)]
        words = flags if o_low is None else o_low
        parts = [unused if x is None else x for x in (partial_o, partial_softmax)]
        lengths = flags if key_lengths is None else key_lengths
        begun = flags if begun is None else begun
        self.launch((q, k, v, o, lengths, *numbers, words, flags, *parts, begun), floats)
        if self.combine is not None:
            self.combine((partial_o, partial_softmax, flags, sinks, *outputs))
        self.again((q, k, v, key_lengths, sinks, flags, *outputs), floats)
        return outputs


def hopper_config(problem: Problem, aligned: bool, ragged: bool) -> HopperConfig | None:
    """The line that serves a call; None where another kernel does. ``aligned``: whether a
    descriptor may start where each operand does; ``ragged``: whether it has key_lengths.
    """
    if any(problem.copies) or (ragged and problem.keys < FEWEST_RAGGED):
        return None
    scores = problem.all_heads * problem.queries * problem.keys
    return hopper_line(HOPPER_FORWARD, problem, aligned, scores)


def plan_hopper(
    problem: Problem, config: HopperConfig, ragged: bool, with_lse: bool, keep: bool
) -> HopperPlan:
    """The plan of a call that a line serves; ``ragged``: with key_lengths."""
    tiles = cdiv(problem.queries, ROWS * config.groups)
    all_tiles, key_tiles = problem.all_heads * tiles, cdiv(problem.keys, config.keys)
    whole, parts = parts_of(all_tiles, key_tiles, problem.gpu.multiprocessors)
    left = all_tiles - whole
    programs = min(problem.gpu.multiprocessors, whole + left * parts)
    together = 2 * problem.keys * problem.width * problem.dtype.itemsize >= BEYOND_CACHE
    launch = DescribedLaunch(
        kernels_hopper.hopper_forward_kernel,
        (programs,),
        problem.device,
        (
            *(problem.queries, problem.keys, problem.heads),
            problem.all_heads * problem.queries,
            *(whole, left, parts, tiles),
            *(int(keep), problem.group),
        ),
        dict(num_warps=4, launch_cooperative_grid=together),
        CONFIG=HopperConstants(
            D=problem.width,
            GROUPS=config.groups,
            BLOCK_K=config.keys,
            STAGES=config.stages,
            REGISTERS=config.registers,
            COPYING_REGISTERS=config.copying_registers,
            GROUPED=problem.group > 1,
            RAGGED=ragged,
            SINKS=problem.sinks is not None,
            LSE=with_lse,
            TOGETHER=together,
        ),
    )
    launch.descriptors = tuple(map(in_tiles, (ROWS, config.keys, config.keys, ROWS)))
    device, dtype, shape = problem.device, problem.dtype, problem.query_shape
    outputs = (
        allocator(shape, dtype, device),
        allocator(problem.rows, torch.float32, device) if with_lse else None,
        allocator((2, *problem.rows), torch.float32, device) if keep else None,
        allocator(problem.low_shape, torch.int32, device) if keep else None,
    )
    partial = (left * parts * config.groups, ROWS)
    blocks = cdiv(problem.queries, ROWS)
    combine = None
    if left:
        combine = Launch(
            kernels_combine.combine_parts_kernel,
            (left * config.groups,),
            device,
            (whole, parts, tiles, problem.queries, problem.heads, math.prod(problem.rows)),
            dict(num_warps=4),
            D=problem.width,
            ROWS=ROWS,
            GROUPS=config.groups,
        )
    return HopperPlan(
        outputs,
        allocator((problem.all_heads, blocks), torch.int32, device),
        allocator((*partial, problem.width), torch.float32, device) if left else None,
        allocator((partial[0], 3, ROWS), torch.float32, device) if left else None,
        allocator((1,), torch.int32, device) if together else None,
        launch,
        combine,
        plan_query_tiles(kernels_streaming.flagged_forward_kernel, problem, AGAIN),
    )


def parts_of(tiles: int, steps: int, programs: int, rounds: int | None = None) -> tuple[int, int]:
    """How many tiles are computed whole, and in how many parts each of the others is, those that do
    not fill all programs: in those that take the least time, in any number of rounds of all
    programs or in as many as ``rounds``. A tile takes so many steps.
    """
    left = tiles % programs
    if not left:
        return tiles, 1

    def time(parts: int) -> int:
        return cdiv(left * parts, programs) * (cdiv(steps, parts) + STEPS_OF_A_PIECE)

    most = min(steps, programs if rounds is None else rounds * programs // left)
    parts = min(range(1, most + 1), key=time)
    return (tiles - left, parts) if parts > 1 else (tiles, 1)
