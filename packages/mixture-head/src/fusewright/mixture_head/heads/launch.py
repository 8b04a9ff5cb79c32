"""The launches of the narrow second layer of grouped heads, forward and backward: their
configurations and plans.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, Launch, Plan, allocator, cdiv
from .._core.lazy import lazy_module
from .._core.precision import power_of_2

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class ForwardConfig(NamedTuple):
    """One program computes ``block_rows`` rows of one head, ``block_cols`` hidden units at a
    time.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_stages: int


class BackwardConfig(NamedTuple):
    """One program computes a part of the rows, ``block_rows`` at a time, at ``block_cols`` hidden
    units of one head; there are up to ``max_parts`` parts of at least ``min_rows`` rows.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    max_parts: int
    min_rows: int


class AddPartsConfig(NamedTuple):
    """One program adds the partial sums of ``block`` weights."""

    block: int
    num_warps: int


# Source: docs/decisions/0026-heads-h200.csv for ten heads of 1376 hidden units; unmeasured for
# others, and for the addition of the partial sums.
FORWARD = ForwardConfig(block_rows=32, block_cols=64, num_warps=4, num_stages=3)
BACKWARD = BackwardConfig(block_rows=64, block_cols=64, num_warps=4, max_parts=64, min_rows=128)
ADD_PARTS = AddPartsConfig(block=1024, num_warps=4)


class BackwardPlan(NamedTuple):
    """One backward pass: its launches, nothing where there are no elements, and its memory."""

    launch: Launch | None
    add_parts: Launch | None
    du: Allocator
    dweight: Allocator
    parts: Allocator


def silu_heads(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU(u) C for u ``[..., G, S]`` and weight ``[G, S, 3]``: ``[..., G, 3]`` in fp32."""
    return silu_heads_of(u, transposed(weight))


def silu_heads_of(u: torch.Tensor, transposed_weight: torch.Tensor) -> torch.Tensor:
    """``silu_heads`` of the weight as ``transposed`` has it: many u need it once."""
    plan = forward_plan(u.shape, u.dtype, u.device)
    (out,) = plan.run((u.contiguous(), transposed_weight))
    return out if plan.launch is not None else out.zero_()


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """C as the forward pass reads it, ``[G, 3, S]`` in fp32: columns that follow one another."""
    heads, stored, outputs = weight.shape
    return weight.new_empty(heads, outputs, stored, dtype=torch.float32).copy_(weight.mT)


@functools.lru_cache(maxsize=4096)
def forward_plan(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for u of this shape and dtype."""
    *leading, heads, stored = shape
    rows = math.prod(leading)
    launch = None
    if math.prod(shape):
        launch = Launch(
            kernels.silu_heads_kernel,
            # On the first axis of the grid, which alone is as long as one likes.
            (cdiv(rows, FORWARD.block_rows) * heads,),
            device,
            (rows,),
            dict(num_warps=FORWARD.num_warps),
            HEADS=heads,
            STORED=stored,
            BLOCK_ROWS=FORWARD.block_rows,
            BLOCK_COLS=min(FORWARD.block_cols, power_of_2(stored)),
            NUM_STAGES=FORWARD.num_stages,
        )
    return Plan(launch, (), (allocator((*leading, heads, 3), torch.float32, device),))


def silu_heads_backward(
    dparams: torch.Tensor, u: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(du, dweight)`` for the gradient ``dparams [..., G, 3]``, in the dtypes of u and weight."""
    plan = backward_plan(u.shape, dparams.dtype, u.dtype, weight.dtype, u.device)
    du = plan.du()
    return du, run_backward(plan, dparams, u, weight, du)


def silu_heads_backward_(
    dparams: torch.Tensor, u: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """The same dweight; du takes the place of u, which is contiguous."""
    # A program reads all that it writes over, before it does.
    plan = backward_plan(u.shape, dparams.dtype, u.dtype, weight.dtype, u.device)
    return run_backward(plan, dparams, u, weight, u)


def run_backward(
    plan: BackwardPlan,
    dparams: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    du: torch.Tensor,
) -> torch.Tensor:
    """dweight; du is written."""
    dweight = plan.dweight()
    if plan.launch is None or plan.add_parts is None:
        return dweight.zero_()
    parts = plan.parts()
    plan.launch((dparams.contiguous(), u.contiguous(), weight.contiguous(), du, parts))
    plan.add_parts((parts, dweight))
    return dweight


def held_rows(block_cols: int, dtype: torch.dtype) -> int:
    """Rows of which the threads of a program hold 16 bytes each at a time."""
    threads = BACKWARD.num_warps * 32
    return max(1, min(BACKWARD.block_rows, threads * 16 // (block_cols * dtype.itemsize)))


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    dparams_dtype: torch.dtype,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> BackwardPlan:
    """The plan for u of this shape and operands of these dtypes."""
    *leading, heads, stored = shape
    rows = math.prod(leading)
    block_cols = min(BACKWARD.block_cols, power_of_2(max(stored, 1)))
    parts = max(1, min(BACKWARD.max_parts, rows // BACKWARD.min_rows))
    part_rows = cdiv(cdiv(rows, parts), BACKWARD.block_rows) * BACKWARD.block_rows
    parts = cdiv(rows, max(part_rows, 1))
    size = heads * stored * 3
    launch = add_parts = None
    if math.prod(shape):
        launch = Launch(
            kernels.silu_heads_backward_kernel,
            # On the first axis of the grid, which alone is as long as one likes.
            (parts * heads * cdiv(stored, block_cols),),
            device,
            (rows, part_rows),
            dict(num_warps=BACKWARD.num_warps),
            HEADS=heads,
            STORED=stored,
            BLOCK_ROWS=BACKWARD.block_rows,
            BLOCK_COLS=block_cols,
            HELD_ROWS=held_rows(block_cols, dtype),
        )
        add_parts = Launch(
            kernels.add_parts_kernel,
            (cdiv(size, ADD_PARTS.block),),
            device,
            (size, parts),
            dict(num_warps=ADD_PARTS.num_warps),
            BLOCK=ADD_PARTS.block,
        )
    return BackwardPlan(
        launch,
        add_parts,
        du=allocator(shape, dtype, device),
        dweight=allocator((heads, stored, 3), weight_dtype, device),
        parts=allocator((parts, heads, stored, 3), torch.float32, device),
    )
