"""The launches of indexer_kl_loss: a part of the rows after the other, whose scores and target are
held in memory that the next part takes over.
"""

from __future__ import annotations

import functools

import torch
import triton

from ._backends import card_of, interpreted
from ._configs import DIVERGENCE, SCORES_AT_A_TIME, TARGET, block_width, line_of
from ._divergence_kernels import _divergence_kernel, _target_kernel
from ._indexer_problem import MAX_ROW_STRIDE, Shape, grid_of, precision_of
from ._launch import Kind, Launch, is_current, kinds
from ._scores import launch_scores, launch_scores_backward

Tensor = torch.Tensor
# How many rows are cut off the sequence at least, and by what their number is divisible.
ROWS = 64


def launch_divergence(
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
    """``(loss, dq_index, dk_index, dw, dbias, dtemperature)``: the mean divergence and, unless they
    are not asked for, its slopes, all in fp32.
    """
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return launch_divergence(
                *(q_index, k_index, w, bias, temperature, q, k, lse, indices, count),
                *(index_scale, scale, causal, q_offset, slopes),
            )
    batches, queries = q.shape[:2]
    q_offset = min(q_offset, k.shape[1])
    q, k = (x if has_near_rows(x) else x.contiguous() for x in (q, k))
    temperature = temperature.detach().float().contiguous()
    divergences: list[Tensor] = []
    steepness: list[Tensor] = []
    dq: list[Tensor] = []
    dw: list[Tensor] = []
    dbias: list[Tensor] = []
    dk = torch.zeros(k_index.shape, dtype=torch.float32, device=q.device)
    for first, last, keys in parts_of(batches, queries, k.shape[1], causal, q_offset):
        offset = q_offset + first
        of_part = (q_index[:, first:last], k_index[:, :keys], w[:, first:last], bias)
        scores = launch_scores(*of_part, index_scale, causal, offset)
        target = torch.empty_like(scores)
        attention = (q[:, first:last], k[:, :keys], lse[:, :, first:last])
        launch_target(*attention, target, scale, causal, offset)
        members = None if indices is None else members_of(indices, count, first, last, keys)
        rows = torch.empty(2, batches, last - first, dtype=torch.float32, device=q.device)
        operands = (scores, target, members, temperature)
        members_stride = 0 if members is None else keys + 1
        sizes = (last - first, keys, members_stride, offset)
        plan_divergence(batches, sizes, causal, members is not None, slopes, q.device)(
            (*operands, rows[0], rows[1])
        )
        divergences.append(rows[0])
        if slopes:
            found = launch_scores_backward(scores, *of_part, index_scale, causal, offset, wide=True)
            dk[:, :keys] += found[1]
            for parts, part in zip((dq, dw, dbias), (found[0], *found[2:]), strict=True):
                parts.append(part)
            steepness.append(rows[1])
    if not divergences:
        none = torch.zeros((), dtype=torch.float32, device=q.device)
        zeros = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q_index, w))
        dq_index, dw_all = zeros
        return none, dq_index, dk, dw_all, torch.zeros_like(bias).float(), none.clone()
    share = 1.0 / (batches * queries)
    loss = torch.cat(divergences, 1).sum() * share
    if not slopes:
        return loss, None, None, None, None, None
    factor = temperature * share
    return (
        loss,
        torch.cat(dq, 1) * factor,
        dk * factor,
        torch.cat(dw, 1) * factor,
        torch.stack(dbias).sum(0) * factor,
        torch.cat(steepness, 1).sum() * share,
    )


def has_near_rows(x: Tensor) -> bool:
    """Whether the kernels can read q or k as it is."""
    return x.stride(-1) == 1 and x.stride(1) <= MAX_ROW_STRIDE


def parts_of(
    batches: int, queries: int, all_keys: int, causal: bool, offset: int
) -> list[tuple[int, int, int]]:
    """Rows from the first to before the second number, which see so many keys at most."""
    parts: list[tuple[int, int, int]] = []
    first = 0
    while batches and all_keys and first < queries:
        last = first + ROWS
        while (
            last < queries
            and batches
            * (last + ROWS - first)
            * min(all_keys, offset + last + ROWS if causal else all_keys)
            <= SCORES_AT_A_TIME
        ):
            last += ROWS
        last = min(last, queries)
        parts.append((first, last, min(all_keys, offset + last) if causal else all_keys))
        first = last
    return parts


def members_of(indices: Tensor, count: Tensor | None, first: int, last: int, keys: int) -> Tensor:
    """Which keys each row from ``first`` to before ``last`` has selected, [B, rows, keys + 1]; the
    last column stands for no key.
    """
    slots = indices[:, first:last]
    there = (slots >= 0) & (slots < keys)
    if count is not None:
        slot = torch.arange(slots.shape[-1], device=slots.device)
        there &= slot < count[:, first:last].unsqueeze(-1)
    members = slots.new_zeros((*slots.shape[:2], keys + 1), dtype=torch.uint8)
    # Whatever the order, a key's mark is the same.
    return members.scatter_(-1, torch.where(there, slots, keys).long(), 1)


def launch_target(
    q: Tensor, k: Tensor, lse: Tensor, target: Tensor, scale: float, causal: bool, offset: int
) -> None:
    """Write the sum of the heads' probabilities of every row and key."""
    launch = target_plan(
        *(q.shape, k.shape, kinds(q, k, lse), causal, offset, precision_of(q.dtype), q.device)
    )
    launch((q, k, lse, target), (scale,))


@functools.lru_cache(maxsize=4096)
def target_plan(
    shape: Shape,
    key_shape: Shape,
    operands: tuple[Kind | None, ...],
    causal: bool,
    offset: int,
    precision: str,
    device: torch.device,
) -> Launch:
    """The launch for operands of these kinds: q, k and lse."""
    q, k, lse = operands
    assert q is not None
    assert k is not None
    assert lse is not None
    batches, queries, heads, width = shape
    keys, key_heads = key_shape[1:3]
    config = line_of(TARGET, width, q[0].itemsize, card_of(device).capability)
    tiles = triton.cdiv(queries, config.queries) * triton.cdiv(keys, config.keys)
    return Launch(
        _target_kernel,
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
def plan_divergence(
    batches: int,
    sizes: tuple[int, ...],
    causal: bool,
    has_members: bool,
    slopes: bool,
    device: torch.device,
) -> Launch:
    """The launch for rows, keys, the stride of members' rows and an offset of these sizes."""
    return Launch(
        _divergence_kernel,
        grid_of(batches * sizes[0]),
        device,
        sizes,
        dict(num_warps=DIVERGENCE.num_warps),
        CAUSAL=causal,
        HAS_MEMBERS=has_members,
        WITH_SLOPES=slopes,
        BLOCK=DIVERGENCE.block,
    )
