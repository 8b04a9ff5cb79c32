"""The launches of the narrow second layer of grouped heads: plans, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._configs import ADD_PARTS, HEADS, HEADS_BACKWARD, power_of_2
from ._heads_kernels import _add_parts_kernel, _silu_heads_backward_kernel, _silu_heads_kernel
from ._launch import Allocate, Launch, is_current, memory


class HeadsPlan(NamedTuple):
    """One forward pass: what it launches, nothing where there are no elements, and its memory."""

    launch: Launch | None
    out: Allocate


class HeadsBackwardPlan(NamedTuple):
    """One backward pass: its launches, nothing where there are no elements, and its memory."""

    launch: Launch | None
    add_parts: Launch | None
    du: Allocate
    dweight: Allocate
    parts: Allocate


def launch_silu_heads(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU(u) C for u ``[..., G, S]`` and weight ``[G, S, 3]``: ``[..., G, 3]`` in fp32."""
    if not is_current(u.device):
        with torch.cuda.device(u.device):
            return launch_silu_heads(u, weight)
    plan = heads_plan(u.shape, u.dtype, weight.dtype, u.device)
    out = plan.out()
    if plan.launch is None:
        return out.zero_()
    plan.launch((u.contiguous(), weight.contiguous(), out))
    return out


@functools.lru_cache(maxsize=4096)
def heads_plan(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> HeadsPlan:
    *leading, heads, stored = shape
    rows = math.prod(leading)
    launch = None
    if math.prod(shape):
        launch = Launch(
            _silu_heads_kernel,
            # On the first axis of the grid, which alone is as long as one likes.
            (triton.cdiv(rows, HEADS.block_rows) * heads,),
            device,
            (rows,),
            dict(num_warps=HEADS.num_warps),
            HEADS=heads,
            STORED=stored,
            BLOCK_ROWS=HEADS.block_rows,
            BLOCK_COLS=min(HEADS.block_cols, power_of_2(stored)),
            NUM_STAGES=HEADS.num_stages,
        )
    return HeadsPlan(launch, memory((*leading, heads, 3), torch.float32, device))


def launch_silu_heads_backward(
    dparams: torch.Tensor, u: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(du, dweight)`` for the gradient ``dparams [..., G, 3]``, in the dtypes of u and weight."""
    if not is_current(u.device):
        with torch.cuda.device(u.device):
            return launch_silu_heads_backward(dparams, u, weight)
    plan = heads_backward_plan(u.shape, dparams.dtype, u.dtype, weight.dtype, u.device)
    du, dweight = plan.du(), plan.dweight()
    if plan.launch is None or plan.add_parts is None:
        return du, dweight.zero_()
    parts = plan.parts()
    plan.launch((dparams.contiguous(), u.contiguous(), weight.contiguous(), du, parts))
    plan.add_parts((parts, dweight))
    return du, dweight


@functools.lru_cache(maxsize=4096)
def heads_backward_plan(
    shape: tuple[int, ...],
    dout_dtype: torch.dtype,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> HeadsBackwardPlan:
    *leading, heads, stored = shape
    rows = math.prod(leading)
    config = HEADS_BACKWARD
    block_cols = min(config.block_cols, power_of_2(max(stored, 1)))
    parts = max(1, min(config.max_parts, rows // config.min_rows))
    part_rows = triton.cdiv(triton.cdiv(rows, parts), config.block_rows) * config.block_rows
    parts = triton.cdiv(rows, max(part_rows, 1))
    size = heads * stored * 3
    launch = add_parts = None
    if math.prod(shape):
        launch = Launch(
            _silu_heads_backward_kernel,
            (parts * heads, triton.cdiv(stored, block_cols)),
            device,
            (rows, part_rows),
            dict(num_warps=config.num_warps),
            HEADS=heads,
            STORED=stored,
            BLOCK_ROWS=config.block_rows,
            BLOCK_COLS=block_cols,
            NUM_STAGES=config.num_stages,
        )
        add_parts = Launch(
            _add_parts_kernel,
            (triton.cdiv(size, ADD_PARTS.block),),
            device,
            (size, parts),
            dict(num_warps=ADD_PARTS.num_warps),
            BLOCK=ADD_PARTS.block,
        )
    return HeadsBackwardPlan(
        launch,
        add_parts,
        du=memory(shape, dtype, device),
        dweight=memory((heads, stored, 3), weight_dtype, device),
        parts=memory((parts, heads, stored, 3), torch.float32, device),
    )
