"""Launches of kernels for Hopper, whose operands are read and written by tensor descriptors, and of
those around a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from .._core.backends import interpreted
from .._core.launches import Launch, contiguous_strides
from .._core.lazy import lazy_module
from .launch import grid_of
from .problem import Problem

if TYPE_CHECKING:
    from . import kernels_descriptors, kernels_hopper_gradients
else:
    kernels_descriptors = lazy_module(__package__, "kernels_descriptors")
    kernels_hopper_gradients = lazy_module(__package__, "kernels_hopper_gradients")

# What the kernels serve.
DTYPES = torch.bfloat16, torch.float16


class Line(Protocol):
    """A line of a table of kernels for Hopper."""

    @property
    def width(self) -> int: ...

    @property
    def fewest_scores(self) -> int: ...


AnyLine = TypeVar("AnyLine", bound=Line)


def hopper_line(
    table: tuple[AnyLine, ...], problem: Problem, aligned: bool, scores: int
) -> AnyLine | None:
    """The line for heads of this width and so many scores; None where none serves. ``aligned``:
    whether a descriptor may start where each operand does.
    """
    if problem.gpu.capability != 90 or problem.dtype not in DTYPES or not aligned:
        return None
    if problem.value_width != problem.width or interpreted():
        return None
    for line in table:
        if problem.width == line.width and scores >= line.fewest_scores:
            return line
    return None


def in_tiles(rows: int) -> Callable[[torch.Tensor], Any]:
    """The descriptor of a tensor [B, rows, H, D] in tiles of this many rows."""

    def describe(x: torch.Tensor) -> Any:
        return kernels_descriptors.descriptor(x, tile_strides(x), rows)

    return describe


def tile_strides(x: torch.Tensor) -> list[int]:
    """The strides; of an axis of one element, along which no address is computed and whose stride
    may be anything, that of a contiguous tensor.
    """
    contiguous = contiguous_strides(x.shape)
    sizes = zip(x.shape, x.stride(), contiguous, strict=True)
    return [own if size > 1 else whole for size, own, whole in sizes]


def in_statistics(x: torch.Tensor) -> Any:
    """The descriptor of one number for each query."""
    return kernels_descriptors.statistics_descriptor(x)


def in_tiles_of_dq(x: torch.Tensor) -> Any:
    """The descriptor of tiles of sums of dq."""
    return kernels_descriptors.dq_descriptor(x)


def plan_prepare(problem: Problem, tiles: int, blocks: int, ranges: int, constants: Any) -> Launch:
    """The launch before a backward pass: the log-sum-exp and delta of every row, in so many tiles
    of queries a head, and the counters of each head of keys, for the blocks of its queries and the
    ranges of its keys, set to zero.
    """
    do_strides = problem.integers[:3]
    sizes = problem.queries, problem.heads, problem.group, math.prod(problem.rows)
    return Launch(
        kernels_hopper_gradients.prepare_kernel,
        grid_of(problem.all_heads * tiles),
        problem.device,
        (*do_strides, *sizes, tiles, blocks, ranges),
        dict(num_warps=4),
        CONFIG=constants,
    )


def plan_round_dq(
    problem: Problem, tiles: int, key_tiles: int, ranges: int, constants: Any
) -> Launch:
    """The launch behind a backward pass: dq, in so many tiles of queries a head, from its sums, one
    for each range of a head's keys, of so many tiles each.
    """
    sizes = problem.queries, problem.keys, problem.heads, problem.group
    return Launch(
        kernels_hopper_gradients.round_dq_kernel,
        grid_of(problem.all_heads * tiles),
        problem.device,
        (*sizes, tiles, key_tiles, ranges),
        dict(num_warps=4),
        CONFIG=constants,
    )
