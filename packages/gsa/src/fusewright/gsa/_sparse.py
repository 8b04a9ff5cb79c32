"""The launches of sparse_attention: plans, allocates and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._backends import card_of, interpreted
from ._configs import (
    LIST_SEGMENT,
    SMALLEST_TILE,
    SPARSE,
    SPARSE_DKDV,
    SPARSE_DQ,
    GatherConfig,
    block_width,
    line_of,
    power_of_2,
)
from ._indexer_problem import MAX_ROW_STRIDE, Shape, grid_of, precision_of, present
from ._inverse import inverse_of
from ._launch import Allocate, Kind, Launch, contiguous_strides, copied, is_current, kinds, memory
from ._sparse_backward_kernels import _add_parts_kernel, _sparse_dkdv_kernel
from ._sparse_kernels import _sparse_dq_kernel, _sparse_forward_kernel

Tensor = torch.Tensor


class Sparse(NamedTuple):
    """q [B, T, H, D] against k and v [B, Tkv, Hkv, D] with selections [B, R, T, K], R = 1 or H.

    A program takes a group of ``rows`` heads that have a selection and a head of keys in common;
    ``shared`` groups have one head of keys.
    """

    batches: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    selections: int
    slots: int
    dtype: torch.dtype
    device: torch.device
    copies: tuple[bool, ...]
    strides: tuple[int, ...]
    selection_strides: tuple[int, ...]
    has_count: bool
    precision: str

    @property
    def groups(self) -> int:
        return self.key_heads if self.selections == 1 else self.heads

    @property
    def rows(self) -> int:
        return self.heads // self.groups

    @property
    def sizes(self) -> tuple[int, ...]:
        shared = self.groups // self.key_heads
        return (self.queries, self.keys, self.heads, self.groups, shared)

    @property
    def empty(self) -> bool:
        return not self.batches * self.queries

    @property
    def score_rows(self) -> int:
        return self.batches * self.heads * self.queries

    def config(self, table: tuple[GatherConfig, ...]) -> GatherConfig:
        capability = card_of(self.device).capability
        return line_of(table, self.width, self.dtype.itemsize, capability)

    def shape(self) -> Shape:
        return (self.batches, self.queries, self.heads, self.width)


class SparsePlan(NamedTuple):
    """One forward pass: its launch (nothing where there are no queries), which operands it copies
    first, and its outputs.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    o: Allocate
    lse: Allocate
    softmax: Allocate
    o_wide: Allocate


class SparseGradientsPlan(NamedTuple):
    """One backward pass: its launches (none where there are no queries or no keys), which operands
    it copies first, its memory and its outputs. ``dk`` and ``dv`` have a head for each group.
    """

    launches: tuple[Launch, Launch, Launch] | None
    copies: tuple[bool, ...]
    most_parts: int
    dq: Allocate
    dk: Allocate
    dv: Allocate
    delta: Allocate
    parts: Allocate


def launch_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None,
    scale: float,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(o, lse, softmax, o_wide)``: o like q, contiguous; lse [B, H, T] in fp32. The others are
    for the backward pass, None without ``keep``: softmax [2, B, H, T] in fp32, the maximum of each
    row of scores, in base 2, and one over the sum of their exponentials below it; and o in fp32,
    None for fp32.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_sparse(q, k, v, indices, count, scale, keep)
    operands = (q, k, v, indices, count)
    shapes = (q.shape, k.shape, indices.shape)
    plan = sparse_plan(shapes, kinds(*operands), keep, precision_of(q.dtype), q.device)
    o, lse = plan.o(), plan.lse()
    softmax = plan.softmax() if keep else None
    o_wide = plan.o_wide() if keep and q.dtype.itemsize < 4 else None
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        plan.launch((*operands, o, lse, softmax, o_wide), (scale,))
    return o, lse, softmax, o_wide


@functools.lru_cache(maxsize=4096)
def sparse_plan(
    shapes: tuple[Shape, Shape, Shape],
    operands: tuple[Kind | None, ...],
    keep: bool,
    precision: str,
    device: torch.device,
) -> SparsePlan:
    """The plan for operands of these kinds: q, k, v, indices and count."""
    sparse = sparse_of(shapes, operands, precision, device)
    launch = None
    if not sparse.empty:
        launch = plan_queries(
            *(_sparse_forward_kernel, sparse, SPARSE),
            KEEP=keep,
            HAS_WIDE=keep and sparse.dtype.itemsize < 4,
        )
    rows = (sparse.batches, sparse.heads, sparse.queries)
    return SparsePlan(
        launch,
        sparse.copies,
        o=memory(sparse.shape(), sparse.dtype, device),
        lse=memory(rows, torch.float32, device),
        softmax=memory((2, *rows), torch.float32, device),
        o_wide=memory(sparse.shape(), torch.float32, device),
    )


def plan_queries(
    kernel: Any, sparse: Sparse, table: tuple[GatherConfig, ...], **constants: Any
) -> Launch:
    """The launch of a kernel that takes one query and one group of heads a program."""
    config = sparse.config(table)
    return Launch(
        kernel,
        grid_of(sparse.batches * sparse.queries * sparse.groups),
        sparse.device,
        (
            *sparse.strides,
            *sparse.selection_strides,
            *sparse.sizes,
            sparse.slots,
            sparse.score_rows,
        ),
        dict(num_warps=config.num_warps),
        D=sparse.width,
        ROWS=sparse.rows,
        HAS_COUNT=sparse.has_count,
        **constants,
        UPCAST=interpreted(),
        PRECISION=sparse.precision,
        BLOCK_G=max(power_of_2(sparse.rows), SMALLEST_TILE),
        BLOCK_K=config.rows,
        BLOCK_D=block_width(sparse.width),
        NUM_STAGES=config.num_stages,
    )


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
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)``, contiguous, from the gradients of o and of lse; ``o`` is as precise as the
    forward pass had it, and ``softmax`` what it returned.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_sparse_backward(do, dlse, q, k, v, indices, count, o, softmax, scale)
    operands = (q, k, v, indices, count)
    shapes = (q.shape, k.shape, indices.shape)
    plan = sparse_gradients_plan(
        *(shapes, kinds(*operands), dlse is not None, precision_of(q.dtype), q.device)
    )
    dq, dk, dv, delta = plan.dq(), plan.dk(), plan.dv(), plan.delta()
    if plan.launches is None:
        for x in (dq, dk, dv):
            x.zero_()
    else:
        if plan.copies:
            operands = copied(operands, plan.copies)
        q, k, v, indices, count = operands
        of_queries, of_keys, of_parts = plan.launches
        do, o, softmax = do.contiguous(), o.contiguous(), softmax.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        of_queries((*operands, o, softmax, do, dlse, dq, delta), (scale,))
        flat_count = None if count is None else count.flatten(0, 1)
        inverse = inverse_of(indices.flatten(0, 1), flat_count, k.shape[1], LIST_SEGMENT)
        lists = (inverse.queries, inverse.key, inverse.first, inverse.last, inverse.part)
        dk_parts, dv_parts = plan.parts(), plan.parts()
        gradients = (dk, dv, dk_parts, dv_parts)
        of_keys((q, k, v, do, softmax, delta, *lists, *gradients), (scale,))
        if plan.most_parts:
            of_parts((inverse.parts, dk_parts, dv_parts, dk, dv))
    if dk.shape != k.shape:
        dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


@functools.lru_cache(maxsize=4096)
def sparse_gradients_plan(
    shapes: tuple[Shape, Shape, Shape],
    operands: tuple[Kind | None, ...],
    has_dlse: bool,
    precision: str,
    device: torch.device,
) -> SparseGradientsPlan:
    """The plan for operands of these kinds: q, k, v, indices and count."""
    sparse = sparse_of(shapes, operands, precision, device)
    total = sparse.queries * sparse.slots
    most_parts = 2 * total // LIST_SEGMENT
    per_group = (sparse.batches, sparse.keys, sparse.groups, sparse.width)
    # Groups that share a head of keys are added in fp32.
    dtype = sparse.dtype if sparse.groups == sparse.key_heads else torch.float32
    launches = None
    if not sparse.empty and sparse.keys:
        launches = (
            plan_queries(_sparse_dq_kernel, sparse, SPARSE_DQ, HAS_DLSE=has_dlse),
            *plan_keys(sparse, total, most_parts),
        )
    parts = (sparse.batches, sparse.groups, most_parts, sparse.width)
    return SparseGradientsPlan(
        launches,
        sparse.copies,
        most_parts,
        dq=memory(sparse.shape(), sparse.dtype, device),
        dk=memory(per_group, dtype, device),
        dv=memory(per_group, dtype, device),
        delta=memory((sparse.batches, sparse.heads, sparse.queries), torch.float32, device),
        parts=memory(parts, torch.float32, device),
    )


def plan_keys(sparse: Sparse, total: int, most_parts: int) -> tuple[Launch, Launch]:
    """The launches that take one segment of a key's queries a program, and that add their sums."""
    config = sparse.config(SPARSE_DKDV)
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
    return of_keys, of_parts


def sparse_of(
    shapes: tuple[Shape, Shape, Shape],
    operands: Sequence[Kind | None],
    precision: str,
    device: torch.device,
) -> Sparse:
    """The problem of q, k and indices of these shapes; ``operands``: kinds of q, k, v, indices and
    count.
    """
    shape, key_shape, selection_shape = shapes
    batches, queries, heads, width = shape
    *wide, indices, count = operands
    copies: list[bool] = []
    strides: list[int] = []
    for each, kind in zip((shape, key_shape, key_shape), wide, strict=True):
        assert kind is not None
        copies.append(kind[1][-1] != 1 or kind[1][1] > MAX_ROW_STRIDE)
        strides += (contiguous_strides(each) if copies[-1] else kind[1])[:-1]
    assert indices is not None
    copies.append(indices[1][-1] != 1)
    found = (contiguous_strides(selection_shape) if copies[-1] else indices[1])[:-1]
    copies.append(False)
    of_count = (0, 0, 0) if count is None else count[1]
    selections = selection_shape[1]
    # All heads go by the one selection.
    along = [0 if selections == 1 and axis == 1 else 1 for axis in range(3)]
    selection_strides = [
        stride * keep
        for given in (found, of_count)
        for stride, keep in zip(given, along, strict=True)
    ]
    return Sparse(
        *(batches, queries, key_shape[1], heads, key_shape[2], width),
        *(selections, selection_shape[-1]),
        dtype=present(wide[0])[0],
        device=device,
        copies=tuple(copies) if any(copies) else (),
        strides=tuple(strides),
        selection_strides=tuple(selection_strides),
        has_count=count is not None,
        precision=precision,
    )
