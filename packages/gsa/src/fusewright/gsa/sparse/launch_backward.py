"""The launches of sparse_attention's backward pass: configurations and plans. dq, and dk with dv,
each may be computed by tiles or not, as the one choice of a call says.
"""

from __future__ import annotations

import functools
from operator import call
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import (
    Allocator,
    Launch,
    allocator,
    contiguous_where,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import input_precision, power_of_2
from ..common.launches import block_width, grid_of
from .launch import plan_marked, plan_queries
from .launch_inverse import inverse_of
from .launch_paths import ways
from .launch_problem import GatherConfig, SparseProblem, UnionConfig, sparse_problem
from .launch_unions import (
    Members,
    Tiles,
    chunks_of_queries,
    plan_members,
    plan_tiles,
    tile_queries,
)

if TYPE_CHECKING:
    from . import kernels_backward, kernels_union_backward
else:
    kernels_backward = lazy_module(__package__, "kernels_backward")
    kernels_union_backward = lazy_module(__package__, "kernels_union_backward")

Tensor = torch.Tensor

# Each table is read from the top; the first line that fits serves. Rows are selected keys of a
# query, and for dk and dv query heads of a key. Unmeasured.
SPARSE_DQ = (
    GatherConfig(128, 2, rows=32, num_warps=4, num_stages=2),
    GatherConfig(256, 4, rows=16, num_warps=4, num_stages=1),
)
SPARSE_DKDV = (
    GatherConfig(64, 4, rows=32, num_warps=4, num_stages=2),
    GatherConfig(128, 4, rows=16, num_warps=4, num_stages=2),
    GatherConfig(256, 4, rows=16, num_warps=4, num_stages=1, hopper=True),
    GatherConfig(256, 4, rows=8, num_warps=4, num_stages=1),
)
# This many queries of a key are one program's; the sums of more are added afterwards.
LIST_SEGMENT = 4096
# Tiles of the union of what queries have selected, and of the queries that have selected a key.
# Widths up to 64: docs/decisions/0014-tiles-h200.csv; the others are unmeasured.
UNION_DQ = (
    UnionConfig(64, 2, rows=64, columns=64, num_warps=4, num_stages=3, hopper=True),
    UnionConfig(128, 2, rows=64, columns=64, num_warps=4, num_stages=2, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=8, num_stages=2),
    UnionConfig(256, 2, rows=32, columns=32, num_warps=4, num_stages=1),
    UnionConfig(64, 4, rows=16, columns=32, num_warps=4, num_stages=1, hopper=True),
    UnionConfig(64, 4, rows=16, columns=32, num_warps=8, num_stages=1),
    UnionConfig(256, 4, rows=16, columns=16, num_warps=8, num_stages=1),
)
UNION_DKDV = (
    UnionConfig(
        64, 2, rows=32, columns=128, num_warps=4, num_stages=3, hopper=True, transposed=True
    ),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=4, num_stages=2, hopper=True),
    UnionConfig(128, 2, rows=64, columns=32, num_warps=8, num_stages=2),
    UnionConfig(256, 2, rows=32, columns=16, num_warps=8, num_stages=1),
    UnionConfig(64, 4, rows=32, columns=16, num_warps=4, num_stages=1, hopper=True),
    UnionConfig(64, 4, rows=32, columns=32, num_warps=8, num_stages=1),
    UnionConfig(256, 4, rows=16, columns=32, num_warps=8, num_stages=1, hopper=True),
    UnionConfig(256, 4, rows=16, columns=32, num_warps=4, num_stages=1),
)


class Chunk(NamedTuple):
    """Some of the queries: their bits, and the passes that go by tiles."""

    members: Members
    dq: Tiles | None
    dkdv: Tiles | None


class KeyByKey(NamedTuple):
    """dk and dv over the inverse of the selection: the segments of a key's queries, and the sums of
    keys with several.
    """

    segments: Launch
    sums: Launch
    most_parts: int
    parts: Allocator


class GradientsPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or no keys), and the memory
    of dq, dk, dv and delta. dk and dv have a head for each group of heads where they go key by key;
    they start at zero, ``zeroed``, where several chunks are added to them.
    """

    empty: bool
    dq_launch: Launch | None
    chunks: tuple[Chunk, ...]
    key_by_key: KeyByKey | None
    zeroed: bool
    memory: tuple[Allocator, ...]


def sparse_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None,
    o: Tensor,
    softmax: Tensor,
    scale: float,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, contiguous, from the gradients of o and of lse; ``o`` is as precise as the
    forward pass had it, and ``softmax`` what it returned.
    """
    operands = (q, k, v, indices, count)
    shapes = (q.shape, k.shape, indices.shape)
    problem = sparse_problem(shapes, layouts(*operands), input_precision(q.dtype), q.device)
    plan = backward_plan(problem, dlse is not None, path)
    dq, dk, dv, delta = map(call, plan.memory)
    if plan.empty:
        dq.zero_()
    if plan.empty or plan.zeroed:
        dk.zero_()
        dv.zero_()
    if problem.copies:
        operands = contiguous_where(operands, problem.copies)
    qkv, (indices, count) = operands[:3], operands[3:]
    do, o, softmax = do.contiguous(), o.contiguous(), softmax.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    of_rows = (o, softmax, do, dlse, dq, delta)
    if plan.dq_launch is not None:
        plan.dq_launch((*operands, *of_rows), (scale,))
    of_keys = (softmax, do, delta, dk, dv)
    for chunk in plan.chunks:
        gradients_of_chunk(chunk, qkv, (indices, count), of_rows, of_keys, scale)
    if plan.key_by_key is not None:
        flat_count = None if count is None else count.flatten(0, 1)
        inverse = inverse_of(indices.flatten(0, 1), flat_count, k.shape[1], LIST_SEGMENT)
        lists = (inverse.queries, inverse.key, inverse.first, inverse.last, inverse.part)
        dk_parts, dv_parts = plan.key_by_key.parts(), plan.key_by_key.parts()
        gradients = (dk, dv, dk_parts, dv_parts)
        plan.key_by_key.segments((*qkv, do, softmax, delta, *lists, *gradients), (scale,))
        if plan.key_by_key.most_parts:
            plan.key_by_key.sums((inverse.parts, dk_parts, dv_parts, dk, dv))
    if dk.shape != k.shape:
        dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq, dk.to(k.dtype), dv.to(k.dtype)


def gradients_of_chunk(
    chunk: Chunk,
    qkv: tuple[Tensor, ...],
    slots: tuple[Tensor, Tensor | None],
    of_rows: tuple[Tensor | None, ...],
    of_keys: tuple[Tensor, ...],
    scale: float,
) -> None:
    """The passes over one chunk of the queries, whose bits are gone afterwards. ``slots``: indices
    and count.
    """
    bits = chunk.members.of(*slots)
    selection = (*slots, bits)
    if chunk.dq is not None:
        chunk.dq.launch((*qkv, *chunk.dq.of(bits), *of_rows), (scale,))
        if chunk.dq.again is not None:
            chunk.dq.again((*qkv, *selection, *of_rows), (scale,))
    if chunk.dkdv is not None:
        lists, segments = chunk.dkdv.of(bits), chunk.dkdv.segments
        operands = (*qkv, *lists, *selection, *of_keys)
        cut, parts = (None, None) if segments is None else segments.of(lists[2])
        chunk.dkdv.launch((*operands, cut, parts), (scale,))
        if segments is not None:
            segments.sums((cut, parts, *of_keys[-2:]), (scale,))
        if chunk.dkdv.again is not None:
            chunk.dkdv.again((*operands, None, None), (scale,))


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: SparseProblem, has_dlse: bool, path: str) -> GradientsPlan:
    """The plan; ``has_dlse``: whether lse has a gradient, for which kernels of dq are compiled."""
    dq_config, dkdv_config = problem.config(UNION_DQ), problem.config(UNION_DKDV)
    empty = problem.empty or not problem.keys
    dq_tiles, dkdv_tiles = (not empty and by_tiles for by_tiles in ways(problem, path))
    dq_launch, key_by_key, chunks = None, None, []
    if not empty and not dq_tiles:
        dq_launch = plan_queries(kernels_backward.sparse_dq_kernel, problem, SPARSE_DQ)
    if not empty and not dkdv_tiles:
        key_by_key = plan_key_by_key(problem)
    if dq_tiles or dkdv_tiles:
        parts = chunks_of_queries(problem, tile_queries(problem, dq_config))
        for first, part in parts:
            members = plan_members(problem, first, part)
            plan = functools.partial(plan_tiles, problem=problem, members=members)
            dq = dkdv = None
            if dq_tiles:
                again = plan_marked(kernels_backward.marked_dq_kernel, problem, SPARSE_DQ, members)
                dq = plan(kernels_union_backward.union_dq_kernel, config=dq_config)
                dq = dq._replace(again=again)
            if dkdv_tiles:
                kernel, adds = kernels_union_backward.union_dkdv_kernel, len(parts) > 1
                dkdv = plan(kernel, config=dkdv_config, of_keys=True, adds=adds)
            chunks.append(Chunk(members, dq, dkdv))
    zeroed = dkdv_tiles and len(chunks) > 1
    groups = problem.groups if key_by_key else problem.key_heads
    # Groups that share a head of keys, and chunks, are added in fp32.
    dtype = torch.float32 if zeroed or groups != problem.key_heads else problem.dtype
    of_keys = allocator(
        (problem.batches, problem.keys, groups, problem.width), dtype, problem.device
    )
    rows = (problem.batches, problem.heads, problem.queries)
    dq_memory = allocator(problem.shape, problem.dtype, problem.device)
    memory = (dq_memory, of_keys, of_keys, allocator(rows, torch.float32, problem.device))
    return GradientsPlan(empty, dq_launch, tuple(chunks), key_by_key, zeroed, memory)


def plan_key_by_key(problem: SparseProblem) -> KeyByKey:
    """The launches that take one segment of a key's queries a program, and that add their sums."""
    config = problem.config(SPARSE_DKDV)
    list_length = problem.queries * problem.slots
    most_parts = 2 * list_length // LIST_SEGMENT
    segments = problem.keys + list_length // LIST_SEGMENT
    groups = problem.batches * problem.groups
    block_rows = power_of_2(problem.rows)
    segments_launch = problem.launch(
        kernels_backward.sparse_dkdv_kernel,
        config,
        groups * segments,
        (*problem.sizes, problem.selections, list_length, segments, most_parts, problem.score_rows),
        HEADS=problem.rows,
        BLOCK=max(config.rows // block_rows, 1),
        BLOCK_G=block_rows,
    )
    sums_launch = Launch(
        kernels_backward.add_parts_kernel,
        grid_of(groups * problem.keys),
        problem.device,
        (problem.keys, problem.groups, problem.selections, most_parts),
        dict(num_warps=1),
        D=problem.width,
        BLOCK_D=block_width(problem.width),
    )
    parts = (problem.batches, problem.groups, most_parts, problem.width)
    return KeyByKey(
        segments_launch, sums_launch, most_parts, allocator(parts, torch.float32, problem.device)
    )
