"""The forward pass of sparse_attention: plans, allocates and launches, by either path."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ._backends import interpreted
from ._configs import SMALLEST_TILE, SPARSE, UNION, GatherConfig, block_width, power_of_2
from ._indexer_problem import Shape, grid_of, precision_of
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._paths import goes_by_tiles
from ._sparse_kernels import _sparse_forward_kernel
from ._sparse_problem import Sparse, sparse_of
from ._union_kernels import _union_forward_kernel
from ._unions import Members, Tiles, plan_members, plan_queries_tiles, stretches, tile_queries

Tensor = torch.Tensor


class SparsePlan(NamedTuple):
    """One forward pass: its launch query by query, or the tiles of stretches of queries (neither
    where there are no queries), which operands it copies first, and its outputs.
    """

    launch: Launch | None
    stretches: tuple[tuple[Members, Tiles], ...]
    copies: tuple[bool, ...]
    o: Allocate
    lse: Allocate
    softmax: Allocate
    o_wide: Allocate


def launch_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    count: Tensor | None,
    scale: float,
    path: str,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(o, lse, softmax, o_wide)``: o like q, contiguous; lse [B, H, T] in fp32. The others are
    for the backward pass, None without ``keep``: softmax [2, B, H, T] in fp32, the maximum of each
    row of scores, in base 2, and one over the sum of their exponentials below it; and o in fp32,
    None for fp32.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_sparse(q, k, v, indices, count, scale, path, keep)
    operands = (q, k, v, indices, count)
    shapes = (q.shape, k.shape, indices.shape)
    plan = sparse_plan(shapes, kinds(*operands), keep, path, precision_of(q.dtype), q.device)
    o, lse = plan.o(), plan.lse()
    softmax = plan.softmax() if keep else None
    o_wide = plan.o_wide() if keep and q.dtype.itemsize < 4 else None
    if plan.copies:
        operands = copied(operands, plan.copies)
    outputs = (o, lse, softmax, o_wide)
    if plan.launch is not None:
        plan.launch((*operands, *outputs), (scale,))
    q, k, v, indices, count = operands
    for members, tiles in plan.stretches:
        lists = tiles.of(members.of(indices, count))
        tiles.launch((q, k, v, *lists, *outputs), (scale,))
    return outputs


@functools.lru_cache(maxsize=4096)
def sparse_plan(
    shapes: tuple[Shape, Shape, Shape],
    operands: tuple[Kind | None, ...],
    keep: bool,
    path: str,
    precision: str,
    device: torch.device,
) -> SparsePlan:
    """The plan for operands of these kinds: q, k, v, indices and count."""
    sparse = sparse_of(shapes, operands, precision, device)
    launch, parts = None, []
    outputs: dict[str, Any] = dict(KEEP=keep, HAS_WIDE=keep and sparse.dtype.itemsize < 4)
    config = sparse.union_config(UNION)
    if sparse.empty:
        pass
    elif goes_by_tiles(sparse, "forward", path, config):
        for stretch in stretches(sparse, tile_queries(sparse, config)):
            members = plan_members(sparse, *stretch)
            tiled = (_union_forward_kernel, sparse, config, members)
            parts.append((members, plan_queries_tiles(*tiled, **outputs)))
    else:
        launch = plan_queries(_sparse_forward_kernel, sparse, SPARSE, **outputs)
    rows = (sparse.batches, sparse.heads, sparse.queries)
    return SparsePlan(
        launch,
        tuple(parts),
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
