"""The backward pass of sparse_attention: plans, allocates and launches. dq, and dk with dv, take
either path, each for itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ._backends import interpreted
from ._configs import (
    LIST_SEGMENT,
    SPARSE_DKDV,
    SPARSE_DQ,
    UNION_DKDV,
    UNION_DQ,
    block_width,
    power_of_2,
)
from ._indexer_problem import Shape, grid_of, precision_of
from ._inverse import inverse_of
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._paths import goes_by_tiles
from ._sparse import plan_queries
from ._sparse_backward_kernels import _add_parts_kernel, _sparse_dkdv_kernel
from ._sparse_kernels import _sparse_dq_kernel
from ._sparse_problem import Sparse, sparse_of
from ._union_backward_kernels import _union_dkdv_kernel
from ._union_kernels import _union_dq_kernel
from ._unions import (
    Members,
    Tiles,
    plan_keys_tiles,
    plan_members,
    plan_queries_tiles,
    stretches,
    tile_queries,
)

Tensor = torch.Tensor


class Stretch(NamedTuple):
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
    parts: Allocate


class SparseGradientsPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or no keys), which operands
    it copies first, its memory and its outputs. ``dk`` and ``dv`` have a head for each group of
    heads where they go key by key, and ``starts`` at zero where several stretches are added.
    """

    nothing: bool
    dq_launch: Launch | None
    stretches: tuple[Stretch, ...]
    by_key: KeyByKey | None
    starts: bool
    copies: tuple[bool, ...]
    dq: Allocate
    dk: Allocate
    dv: Allocate
    delta: Allocate


def launch_sparse_backward(
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
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            found = (do, dlse, q, k, v, indices, count, o, softmax, scale, path)
            return launch_sparse_backward(*found)
    operands = (q, k, v, indices, count)
    shapes = (q.shape, k.shape, indices.shape)
    plan = sparse_gradients_plan(
        *(shapes, kinds(*operands), dlse is not None, path, precision_of(q.dtype), q.device)
    )
    dq, dk, dv, delta = plan.dq(), plan.dk(), plan.dv(), plan.delta()
    if plan.nothing:
        dq.zero_()
    if plan.nothing or plan.starts:
        dk.zero_()
        dv.zero_()
    if plan.copies:
        operands = copied(operands, plan.copies)
    wide, (indices, count) = operands[:3], operands[3:]
    do, o, softmax = do.contiguous(), o.contiguous(), softmax.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    of_rows = (o, softmax, do, dlse, dq, delta)
    if plan.dq_launch is not None:
        plan.dq_launch((*operands, *of_rows), (scale,))
    for stretch in plan.stretches:
        members = stretch.members.of(indices, count)
        if stretch.dq is not None:
            stretch.dq.launch((*wide, *stretch.dq.of(members), *of_rows), (scale,))
        if stretch.dkdv is not None:
            of_keys = (softmax, do, delta, dk, dv)
            stretch.dkdv.launch((*wide, *stretch.dkdv.of(members), *of_keys), (scale,))
    if plan.by_key is not None:
        flat_count = None if count is None else count.flatten(0, 1)
        inverse = inverse_of(indices.flatten(0, 1), flat_count, k.shape[1], LIST_SEGMENT)
        lists = (inverse.queries, inverse.key, inverse.first, inverse.last, inverse.part)
        dk_parts, dv_parts = plan.by_key.parts(), plan.by_key.parts()
        gradients = (dk, dv, dk_parts, dv_parts)
        plan.by_key.segments((*wide, do, softmax, delta, *lists, *gradients), (scale,))
        if plan.by_key.most_parts:
            plan.by_key.sums((inverse.parts, dk_parts, dv_parts, dk, dv))
    if dk.shape != k.shape:
        dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq, dk.to(k.dtype), dv.to(k.dtype)


@functools.lru_cache(maxsize=4096)
def sparse_gradients_plan(
    shapes: tuple[Shape, Shape, Shape],
    operands: tuple[Kind | None, ...],
    has_dlse: bool,
    path: str,
    precision: str,
    device: torch.device,
) -> SparseGradientsPlan:
    """The plan for operands of these kinds: q, k, v, indices and count."""
    sparse = sparse_of(shapes, operands, precision, device)
    of_dq, of_dkdv = sparse.union_config(UNION_DQ), sparse.union_config(UNION_DKDV)
    nothing = sparse.empty or not sparse.keys
    dq_tiles = not nothing and goes_by_tiles(sparse, "dq", path, of_dq)
    dkdv_tiles = not nothing and goes_by_tiles(sparse, "dkdv", path, of_dkdv)
    dq_launch, by_key, parts = None, None, []
    if not nothing and not dq_tiles:
        dq_launch = plan_queries(_sparse_dq_kernel, sparse, SPARSE_DQ, HAS_DLSE=has_dlse)
    if not nothing and not dkdv_tiles:
        by_key = plan_key_by_key(sparse)
    if dq_tiles or dkdv_tiles:
        cut = stretches(sparse, tile_queries(sparse, of_dq))
        for stretch in cut:
            members = plan_members(sparse, *stretch)
            dq = dkdv = None
            if dq_tiles:
                tiled = (_union_dq_kernel, sparse, of_dq, members)
                dq = plan_queries_tiles(*tiled, HAS_DLSE=has_dlse)
            if dkdv_tiles:
                tiled = (_union_dkdv_kernel, sparse, of_dkdv, members)
                dkdv = plan_keys_tiles(*tiled, ADDS=len(cut) > 1)
            parts.append(Stretch(members, dq, dkdv))
    adds = dkdv_tiles and len(parts) > 1
    groups = sparse.groups if by_key else sparse.key_heads
    shape = (sparse.batches, sparse.keys, groups, sparse.width)
    # Groups that share a head of keys, and stretches, are added in fp32.
    dtype = torch.float32 if adds or groups != sparse.key_heads else sparse.dtype
    return SparseGradientsPlan(
        nothing,
        dq_launch,
        tuple(parts),
        by_key,
        adds,
        sparse.copies,
        dq=memory(sparse.shape(), sparse.dtype, device),
        dk=memory(shape, dtype, device),
        dv=memory(shape, dtype, device),
        delta=memory((sparse.batches, sparse.heads, sparse.queries), torch.float32, device),
    )


def plan_key_by_key(sparse: Sparse) -> KeyByKey:
    """The launches that take one segment of a key's queries a program, and that add their sums."""
    config = sparse.config(SPARSE_DKDV)
    total = sparse.queries * sparse.slots
    most_parts = 2 * total // LIST_SEGMENT
    segments = sparse.keys + total // LIST_SEGMENT
    groups = sparse.batches * sparse.groups
    block_rows = power_of_2(sparse.rows)
    tile = dict(D=sparse.width, BLOCK_D=block_width(sparse.width))
    of_keys = Launch(
        _sparse_dkdv_kernel,
        grid_of(groups * segments),
        sparse.device,
        (
            *(*sparse.strides, *sparse.sizes, sparse.selections),
            *(total, segments, most_parts, sparse.score_rows),
        ),
        dict(num_warps=config.num_warps),
        D=sparse.width,
        ROWS=sparse.rows,
        UPCAST=interpreted(),
        PRECISION=sparse.precision,
        BLOCK_T=max(config.rows // block_rows, 1),
        BLOCK_G=block_rows,
        BLOCK_D=tile["BLOCK_D"],
        NUM_STAGES=config.num_stages,
    )
    of_parts = Launch(
        _add_parts_kernel,
        grid_of(groups * sparse.keys),
        sparse.device,
        (sparse.keys, sparse.groups, sparse.selections, most_parts),
        dict(num_warps=1),
        **tile,
    )
    shape = (sparse.batches, sparse.groups, most_parts, sparse.width)
    return KeyByKey(of_keys, of_parts, most_parts, memory(shape, torch.float32, sparse.device))
