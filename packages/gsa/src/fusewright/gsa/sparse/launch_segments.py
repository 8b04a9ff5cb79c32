"""The launches of lists of queries that are cut into segments, so that dk and dv of keys that most
queries have selected, such as the sinks, do not wait for one program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, Launch, allocator, cdiv
from .._core.lazy import lazy_module
from ..common.launches import block_width, grid_of
from .launch_problem import SparseProblem, UnionConfig

if TYPE_CHECKING:
    from . import kernels_segments
else:
    kernels_segments = lazy_module(__package__, "kernels_segments")

Tensor = torch.Tensor
# About so many programs go through the lists of all heads of keys, beside those of lists that are
# shorter than a segment. Partial sums take no more than 2 SEGMENTS tiles. Unmeasured.
SEGMENTS = 1024
# The least length of a segment, in pairs of a query and a head; the last one of a list may be
# shorter. Unmeasured.
SHORTEST = 1024
# Tiles of which one program looks at the lists at a time.
TILES_AT_A_TIME = 256


class Segments(NamedTuple):
    """The launch that cuts the lists, the one that adds what the segments gave, how many segments
    there are at most, and how many of these give partial sums, and the memory of both.
    """

    cutting: Launch
    sums: Launch
    most: int
    most_parts: int
    cut: Allocator
    parts: Allocator

    def of(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """How lists of these lengths are cut, as ``segments_kernel`` writes it, and memory for
        partial sums.
        """
        cut = self.cut()
        self.cutting((lengths, cut))
        return cut, self.parts()


def plan_segments(
    problem: SparseProblem, config: UnionConfig, part: int, tile: int, adds: bool
) -> Segments | None:
    """Of the lists that tiles of ``tile`` keys have of ``part`` queries; None where none is cut."""
    stack, tiles = config.stacked(problem.rows), cdiv(problem.keys, tile)
    # Whole blocks of columns.
    shortest = max(SHORTEST, config.columns) // stack
    each = cdiv(part, shortest)
    # Blocks of heads that share a head of keys are added in one program, by one list.
    if each == 1 or not (problem.selections == 1 or problem.heads == stack * problem.key_heads):
        return None
    of_heads = problem.batches * problem.key_heads
    target = SEGMENTS // of_heads
    # One segment holds all lists of its head.
    if target < 2:
        return None
    # A list has ``each`` segments at most; all lists have no more than ``target`` beyond their
    # first ones, and a list that is cut is longer than a segment.
    most = min(tiles + target, tiles * each)
    most_parts = min(2 * target, tiles * each)
    lists = problem.batches * problem.selections
    cutting = Launch(
        kernels_segments.segments_kernel,
        grid_of(lists),
        problem.device,
        (tiles, most, target, shortest),
        dict(num_warps=4),
        BLOCK=TILES_AT_A_TIME,
    )
    sums = Launch(
        kernels_segments.add_segments_kernel,
        grid_of(of_heads * tiles),
        problem.device,
        (problem.keys, problem.key_heads, problem.selections, tiles, most, most_parts),
        dict(num_warps=4),
        TILE=tile,
        D=problem.width,
        BLOCK_D=block_width(problem.width),
        ADDS=adds,
    )
    shape = (2, of_heads, most_parts, tile, problem.width)
    return Segments(
        cutting,
        sums,
        most,
        most_parts,
        allocator((lists, most + 2 * tiles + 2), torch.int32, problem.device),
        allocator(shape, torch.float32, problem.device),
    )
