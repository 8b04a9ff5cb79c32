"""The launches of sparse_attention's forward pass, by either path: configurations and plans."""

from __future__ import annotations

import functools
from operator import call
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import (
    Allocator,
    Launch,
    allocator,
    cdiv,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import input_precision, power_of_2
from ..common.launches import SMALLEST_TILE
from .launch_paths import ways
from .launch_problem import (
    ALL_REGISTERS,
    GatherConfig,
    SparseProblem,
    UnionConfig,
    sparse_problem,
)
from .launch_unions import (
    Members,
    Tiles,
    chunks_of_queries,
    plan_members,
    plan_tiles,
    tile_queries,
)

if TYPE_CHECKING:
    from . import kernels, kernels_union
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_union = lazy_module(__package__, "kernels_union")

Tensor = torch.Tensor

# Each table is read from the top; the first line that fits serves. Rows are selected keys of a
# query. Unmeasured.
SPARSE = (
    GatherConfig(128, 2, rows=64, num_warps=4, num_stages=2, hopper=True),
    GatherConfig(256, 2, rows=32, num_warps=4, num_stages=1),
    GatherConfig(256, 4, rows=16, num_warps=8, num_stages=1),
)
# Tiles of the union of what queries have selected. Widths up to 64:
# docs/decisions/0014-tiles-h200.csv; the others are unmeasured.
UNION = (
    UnionConfig(64, 2, rows=64, columns=128, num_warps=4, num_stages=3, hopper=True),
    UnionConfig(128, 2, rows=128, columns=64, num_warps=8, num_stages=2, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=4, num_stages=2),
    UnionConfig(256, 2, rows=32, columns=32, num_warps=4, num_stages=1),
    UnionConfig(64, 4, rows=32, columns=16, num_warps=4, num_stages=1),
    UnionConfig(256, 4, rows=16, columns=16, num_warps=8, num_stages=1),
)
# One program looks for marks among so many queries.
MARKED_AT_A_TIME = 64


class SparsePlan(NamedTuple):
    """One forward pass: its launch query by query, or the tiles of chunks of queries (neither where
    there are no queries), and the memory of its outputs.
    """

    launch: Launch | None
    chunks: tuple[tuple[Members, Tiles], ...]
    outputs: tuple[Allocator, ...]


def sparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None,
    scale: float,
    path: str,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(o, lse, softmax, o_wide)``: o like q, contiguous; lse [B, H, T] in fp32. The last two are
    for the backward pass, None without ``keep``: softmax [2, B, H, T] in fp32, the maximum of each
    row of scores, in base 2, and one over the sum of their exponentials below it; and o in fp32,
    None for fp32.
    """
    operands = (q, k, v, indices, count)
    shapes = (q.shape, k.shape, indices.shape)
    problem = sparse_problem(shapes, layouts(*operands), input_precision(q.dtype), q.device)
    plan = forward_plan(problem, keep, path)
    o, lse, *kept = map(call, plan.outputs)
    softmax, o_wide = (*kept, None, None)[:2]
    if problem.copies:
        operands = contiguous_where(operands, problem.copies)
    outputs = (o, lse, softmax, o_wide)
    if plan.launch is not None:
        plan.launch((*operands, *outputs), (scale,))
    q, k, v, indices, count = operands
    for members, tiles in plan.chunks:
        bits = members.of(indices, count)
        tiles.launch((q, k, v, *tiles.of(bits), *outputs), (scale,))
        if tiles.again is not None:
            tiles.again((q, k, v, indices, count, bits, *outputs), (scale,))
        # They go before the next chunk's are allocated.
        del bits
    return outputs


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: SparseProblem, keep: bool, path: str) -> SparsePlan:
    """The plan; with ``keep`` for a backward pass too."""
    launch, chunks = None, []
    config = problem.config(UNION)
    if problem.empty:
        pass
    elif ways(problem, path).of_queries:
        kernel = kernels_union.union_forward_kernel
        for first, part in chunks_of_queries(problem, tile_queries(problem, config)):
            members = plan_members(problem, first, part)
            tiles = plan_tiles(kernel, problem, config, members)
            again = plan_marked(kernels.marked_forward_kernel, problem, SPARSE, members)
            chunks.append((members, tiles._replace(again=again)))
    else:
        launch = plan_queries(kernels.sparse_forward_kernel, problem, SPARSE)
    rows, shape = (problem.batches, problem.heads, problem.queries), problem.shape
    outputs = [(shape, problem.dtype), (rows, torch.float32)]
    if keep:
        outputs += [((2, *rows), torch.float32)]
        outputs += [(shape, torch.float32)] if problem.dtype.itemsize < 4 else []
    memory = (allocator(*output, problem.device) for output in outputs)
    return SparsePlan(launch, tuple(chunks), tuple(memory))


def plan_queries(kernel: Any, problem: SparseProblem, table: tuple[GatherConfig, ...]) -> Launch:
    """The launch of a kernel that takes one query and one group of heads a program."""
    config, heads = problem.config(table), problem.rows
    return problem.launch(
        kernel,
        config,
        problem.batches * problem.queries * problem.groups,
        (*problem.selection_strides, *problem.sizes, problem.slots, problem.score_rows),
        HEADS=heads,
        BLOCK=config.rows,
        BLOCK_G=max(power_of_2(heads), SMALLEST_TILE),
    )


def plan_marked(
    kernel: Any, problem: SparseProblem, table: tuple[GatherConfig, ...], members: Members
) -> Launch:
    """The launch of a kernel that takes the marked ones of some queries and one group of heads a
    program.
    """
    # With four warps, or with fewer registers than there are, some lines spill here.
    config, heads = problem.config(table)._replace(num_warps=8), problem.rows
    of_bits = (members.first, members.part, problem.selections, members.marks)
    return problem.launch(
        kernel,
        config,
        problem.batches * cdiv(members.part, MARKED_AT_A_TIME) * problem.groups,
        (*problem.selection_strides, *of_bits, *problem.sizes, problem.slots, problem.score_rows),
        ALL_REGISTERS,
        HEADS=heads,
        BLOCK=config.rows,
        BLOCK_G=max(power_of_2(heads), SMALLEST_TILE),
        TILE=MARKED_AT_A_TIME,
    )
