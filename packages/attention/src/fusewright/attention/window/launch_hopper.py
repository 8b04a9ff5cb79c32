"""The launches of the forward pass of sliding_window_attention on Hopper: warp groups that copy and
multiply, and the tiles that are computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, DescribedLaunch, Launch, allocate, allocator, cdiv
from .._core.lazy import lazy_module
from ..common.launch import Outputs, plan_query_tiles
from ..common.launch_hopper import AnyLine, hopper_line, in_tiles
from ..common.problem import Problem, TileConfig, tile_config

if TYPE_CHECKING:
    from . import kernels, kernels_hopper
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_hopper = lazy_module(__package__, "kernels_hopper")

# Queries of a group of warps.
ROWS = 64
# Heads whose tiles of queries are computed side by side: the keys that these see stay in the L2
# cache. Source: docs/decisions/0020-forward-h200.csv.
MOST_TOGETHER = 64


class HopperConfig(NamedTuple):
    """Serves heads of ``width`` and calls of ``fewest_scores`` scores and more: so many
    groups of warps with queries, tiles of ``keys`` rows in a ring of ``stages``, so many registers
    a thread that multiplies and that copies.
    """

    width: int
    fewest_scores: int
    groups: int
    keys: int
    stages: int
    registers: int
    copying_registers: int


class HopperConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``: the sizes of a HopperConfig; LSE:
    whether it writes lse.
    """

    D: int
    GROUPS: int
    BLOCK_K: int
    STAGES: int
    REGISTERS: int
    COPYING_REGISTERS: int
    LSE: bool


# Source: docs/decisions/0020-forward-h200.csv.
HOPPER_FORWARD = (
    HopperConfig(
        *(64, 1 << 25),
        groups=3,
        keys=64,
        stages=6,
        registers=160,
        copying_registers=24,
    ),
    HopperConfig(
        *(128, 1 << 25),
        groups=2,
        keys=64,
        stages=4,
        registers=240,
        copying_registers=24,
    ),
)
# What computes flagged tiles again, as many queries a program as a group has.
AGAIN = (
    TileConfig(64, 2, queries=ROWS, keys=64, num_warps=4, num_stages=3),
    TileConfig(128, 2, queries=ROWS, keys=32, num_warps=8, num_stages=2),
)


class HopperPlan(NamedTuple):
    """One forward pass: the allocators of o, lse, softmax and o_low, and of flags; and its
    launches.
    """

    outputs: tuple[Allocator | None, ...]
    flags: Allocator
    launch: Launch
    again: Launch

    def run(self, operands: tuple[torch.Tensor | None, ...], floats: tuple[float, ...]) -> Outputs:
        """Allocate and launch; ``operands`` are q, k, v, bounds and sinks, both of them absent."""
        q, k, v, *_ = operands
        o, lse, softmax, o_low = outputs = tuple(allocate(each) for each in self.outputs)
        flags = self.flags()
        # A kernel takes no absent descriptor or pointer here; what stands in is not touched, and
        # has the dtype, so that one compilation serves.
        unused = flags.view(torch.float32)
        numbers = [unused if x is None else x for x in (lse, softmax)]
        words = flags if o_low is None else o_low
        self.launch((q, k, v, o, *numbers, words, flags), floats)
        self.again((q, k, v, None, None, flags, *outputs), floats)
        return outputs


def window_line(
    table: tuple[AnyLine, ...], problem: Problem, aligned: bool, window: int, prefix: int
) -> AnyLine | None:
    """The line that serves a pass; None where another kernel does. ``aligned``: whether a
    descriptor may start where each operand does.
    """
    # Tiles of queries and of keys begin at the same rows of a sequence, and no window ends in the
    # tile in which it begins.
    if any(problem.copies) or prefix or problem.queries != problem.keys or window < ROWS:
        return None
    # The delta of the backward pass has the rounding of the probabilities of o, which is much in
    # dsinks.
    if not problem.plain:
        return None
    scores = problem.all_heads * problem.queries * window
    return hopper_line(table, problem, aligned, scores)


def hopper_config(problem: Problem, aligned: bool, window: int, prefix: int) -> HopperConfig | None:
    """The line that serves a call, as ``window_line`` says."""
    return window_line(HOPPER_FORWARD, problem, aligned, window, prefix)


def plan_hopper(
    problem: Problem, config: HopperConfig, window: int, with_lse: bool, keep: bool
) -> HopperPlan:
    """The plan of a call that a line serves."""
    device, dtype, shape = problem.device, problem.dtype, problem.query_shape
    tiles, blocks = cdiv(problem.queries, ROWS * config.groups), cdiv(problem.queries, ROWS)
    pieces = problem.all_heads * tiles
    rows = problem.all_heads * problem.queries
    together = max(n for n in range(1, MOST_TOGETHER + 1) if problem.all_heads % n == 0)
    launch = DescribedLaunch(
        kernels_hopper.window_hopper_forward_kernel,
        (min(problem.gpu.multiprocessors, pieces),),
        device,
        (pieces, problem.queries, problem.heads, rows, tiles, window, together, int(keep)),
        dict(num_warps=4),
        CONFIG=HopperConstants(
            D=problem.width,
            GROUPS=config.groups,
            BLOCK_K=config.keys,
            STAGES=config.stages,
            REGISTERS=config.registers,
            COPYING_REGISTERS=config.copying_registers,
            LSE=with_lse,
        ),
    )
    launch.descriptors = tuple(map(in_tiles, (ROWS, config.keys, config.keys, ROWS)))
    outputs = (
        allocator(shape, dtype, device),
        allocator(problem.rows, torch.float32, device) if with_lse else None,
        allocator((2, *problem.rows), torch.float32, device) if keep else None,
        allocator(problem.low_shape, torch.int32, device) if keep else None,
    )
    kernel = kernels.flagged_window_forward_kernel
    again = plan_query_tiles(kernel, problem, tile_config(AGAIN, problem))
    flags = allocator((problem.all_heads, blocks), torch.int32, device)
    return HopperPlan(outputs, flags, launch, again)
