"""The launches of indexer_kl_loss: configurations and plans. One chunk of the rows after the other
has its scores and target in memory that the next chunk overwrites.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import Launch, Layout, cdiv, is_current, layouts
from .._core.lazy import lazy_module
from .._core.precision import input_precision
from ..common.launches import (
    MAX_ROW_STRIDE,
    Shape,
    TileConfig,
    block_width,
    config_for,
    grid_of,
    present,
)
from ..indexer.launch import scores_backward, scores_forward

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class RowConfig(NamedTuple):
    """One program reads a row ``block`` numbers at a time."""

    block: int
    num_warps: int


# Read from the top; the first line that fits serves. Both are unmeasured.
TARGET = (
    TileConfig(128, 2, queries=64, keys=128, num_warps=8, num_stages=2, hopper=True),
    TileConfig(256, 2, queries=64, keys=64, num_warps=8, num_stages=1, hopper=True),
    TileConfig(256, 2, queries=32, keys=32, num_warps=4, num_stages=1),
    TileConfig(64, 4, queries=32, keys=16, num_warps=4, num_stages=1),
    TileConfig(256, 4, queries=16, keys=16, num_warps=8, num_stages=1),
)
DIVERGENCE = RowConfig(block=2048, num_warps=4)
# The scores of a chunk of rows, which stay in the L2 cache of a GPU.
SCORES_AT_A_TIME = 1 << 23
# The rows of a chunk are a multiple of this number, but for the last chunk's.
ROWS = 64


def divergence(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    bias: Tensor,
    temperature: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    count: Tensor | None,
    index_scale: float,
    scale: float,
    causal: bool,
    q_offset: int,
    slopes: bool = True,
) -> tuple[Tensor | None, ...]:
    """``(loss, dq_index, dk_index, dw, dbias, dtemperature)``: the mean divergence and, with
    ``slopes``, its gradients, all in fp32.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return divergence(
                q_index,
                k_index,
                w,
                bias,
                temperature,
                q,
                k,
                lse,
                indices,
                count,
                index_scale,
                scale,
                causal,
                q_offset,
                slopes,
            )
    batches, queries = q.shape[:2]
    q_offset = min(q_offset, k.shape[1])
    q, k = (x if rows_are_near(x) else x.contiguous() for x in (q, k))
    temperature = temperature.detach().float().contiguous()
    # Of each chunk of rows.
    divergences: list[Tensor] = []
    dtemperatures: list[Tensor] = []
    dq: list[Tensor] = []
    dw: list[Tensor] = []
    dbias: list[Tensor] = []
    dk = torch.zeros(k_index.shape, dtype=torch.float32, device=q.device)
    for first, last, keys in chunks_of_rows(batches, queries, k.shape[1], causal, q_offset):
        offset = q_offset + first
        operands = (q_index[:, first:last], k_index[:, :keys], w[:, first:last], bias)
        scores = scores_forward(*operands, index_scale, causal, offset)
        target = torch.empty_like(scores)
        attention = (q[:, first:last], k[:, :keys], lse[:, :, first:last])
        write_target(*attention, target, scale, causal, offset)
        members = None if indices is None else members_of(indices, count, first, last, keys)
        rows = torch.empty(2, batches, last - first, dtype=torch.float32, device=q.device)
        members_stride = 0 if members is None else keys + 1
        sizes = (last - first, keys, members_stride, offset)
        launch = divergence_plan(batches, sizes, causal, members is not None, slopes, q.device)
        launch((scores, target, members, temperature, rows[0], rows[1]))
        divergences.append(rows[0])
        if slopes:
            # The launch has replaced the scores by their gradients.
            dq_part, dk_part, dw_part, dbias_part = scores_backward(
                scores, *operands, index_scale, causal, offset, wide=True
            )
            dq.append(dq_part)
            dk[:, :keys] += dk_part
            dw.append(dw_part)
            dbias.append(dbias_part)
            dtemperatures.append(rows[1])
    if not divergences:
        loss = torch.zeros((), dtype=torch.float32, device=q.device)
        dq_index, dw_index = (
            torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q_index, w)
        )
        return loss, dq_index, dk, dw_index, torch.zeros_like(bias).float(), loss.clone()
    row_weight = 1.0 / (batches * queries)
    loss = torch.cat(divergences, 1).sum() * row_weight
    if not slopes:
        return loss, None, None, None, None, None
    factor = temperature * row_weight
    return (
        loss,
        torch.cat(dq, 1) * factor,
        dk * factor,
        torch.cat(dw, 1) * factor,
        torch.stack(dbias).sum(0) * factor,
        torch.cat(dtemperatures, 1).sum() * row_weight,
    )


def rows_are_near(x: Tensor) -> bool:
    """Whether the kernels can read q or k as it is."""
    return x.stride(-1) == 1 and x.stride(1) <= MAX_ROW_STRIDE


def chunks_of_rows(
    batches: int, queries: int, all_keys: int, causal: bool, offset: int
) -> list[tuple[int, int, int]]:
    """Chunks ``(first, last, keys)``: rows from ``first`` to before ``last``, and how many keys
    they see at most.
    """

    def keys_before(row: int) -> int:
        return min(all_keys, offset + row) if causal else all_keys

    chunks: list[tuple[int, int, int]] = []
    first = 0
    while batches and all_keys and first < queries:
        last = first + ROWS
        while (
            last < queries
            and batches * (last + ROWS - first) * keys_before(last + ROWS) <= SCORES_AT_A_TIME
        ):
            last += ROWS
        last = min(last, queries)
        chunks.append((first, last, keys_before(last)))
        first = last
    return chunks


def members_of(indices: Tensor, count: Tensor | None, first: int, last: int, keys: int) -> Tensor:
    """Which keys each row from ``first`` to before ``last`` has selected, [B, rows, keys + 1]; the
    last column is for no key.
    """
    slots = indices[:, first:last]
    valid = (slots >= 0) & (slots < keys)
    if count is not None:
        slot = torch.arange(slots.shape[-1], device=slots.device)
        valid &= slot < count[:, first:last].unsqueeze(-1)
    members = slots.new_zeros((*slots.shape[:2], keys + 1), dtype=torch.uint8)
    # All writes to one place are ones: their order does not matter.
    return members.scatter_(-1, torch.where(valid, slots, keys).long(), 1)


def write_target(
    q: Tensor, k: Tensor, lse: Tensor, target: Tensor, scale: float, causal: bool, offset: int
) -> None:
    """Write the sum of the heads' probabilities of every row and key."""
    launch = target_plan(
        q.shape,
        k.shape,
        layouts(q, k, lse),
        causal,
        offset,
        input_precision(q.dtype),
        q.device,
    )
    launch((q, k, lse, target), (scale,))


@functools.lru_cache(maxsize=4096)
def target_plan(
    shape: Shape,
    key_shape: Shape,
    operands: tuple[Layout | None, ...],
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
) -> Launch:
    """The launch for operands of these layouts: q, k and lse."""
    q, k, lse = (present(layout) for layout in operands)
    batches, queries, heads, width = shape
    keys, key_heads = key_shape[1:3]
    config = config_for(TARGET, width, q[0].itemsize, device)
    tiles = cdiv(queries, config.queries) * cdiv(keys, config.keys)
    return Launch(
        kernels.target_kernel,
        grid_of(batches * tiles),
        device,
        (*q[1][:-1], *k[1][:-1], *lse[1], queries, keys, heads, heads // key_heads, offset),
        dict(num_warps=config.num_warps, num_stages=config.num_stages),
        D=width,
        CAUSAL=causal,
        UPCAST=interpreted(),
        PRECISION=precision,
        BLOCK_Q=config.queries,
        BLOCK_K=config.keys,
        BLOCK_D=block_width(width),
    )


@functools.lru_cache(maxsize=4096)
def divergence_plan(
    batches: int,
    sizes: tuple[int, ...],
    causal: bool,
    has_members: bool,
    slopes: bool,
    device: torch.device,
) -> Launch:
    """The launch for these ``sizes``: rows, keys, the stride of members' rows, and the offset."""
    return Launch(
        kernels.divergence_kernel,
        grid_of(batches * sizes[0]),
        device,
        sizes,
        dict(num_warps=DIVERGENCE.num_warps),
        CAUSAL=causal,
        HAS_MEMBERS=has_members,
        WITH_SLOPES=slopes,
        BLOCK=DIVERGENCE.block,
    )
