"""The launches of sinkhorn_knopp, forward and backward: their configurations and plans."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocate,
    allocator,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from ..common.rows import count_rows, row_strides, to_copy

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class SinkhornConfig(NamedTuple):
    """One program holds ``matrices`` square matrices of up to ``max_n`` rows in registers; in the
    backward pass ``programs_per_sm`` programs stay on each multiprocessor and loop over blocks of
    them.
    """

    max_n: int
    matrices: int
    num_warps: int
    programs_per_sm: int = 0


# Small matrices lie many to a warp, so that the sums of a row or column are a few steps inside the
# warp. Of 4 and 64 rows from results/tuning-sinkhorn-h200-torch2.11-triton3.6.csv, unmeasured of
# others.
SINKHORN_FORWARD = (
    SinkhornConfig(max_n=2, matrices=64, num_warps=1),
    SinkhornConfig(max_n=4, matrices=32, num_warps=1),
    SinkhornConfig(max_n=8, matrices=8, num_warps=1),
    SinkhornConfig(max_n=16, matrices=4, num_warps=2),
    SinkhornConfig(max_n=32, matrices=1, num_warps=2),
    SinkhornConfig(max_n=64, matrices=1, num_warps=4),
)
SINKHORN_BACKWARD = (
    SinkhornConfig(max_n=2, matrices=64, num_warps=1, programs_per_sm=16),
    SinkhornConfig(max_n=4, matrices=32, num_warps=1, programs_per_sm=16),
    SinkhornConfig(max_n=8, matrices=8, num_warps=1, programs_per_sm=16),
    SinkhornConfig(max_n=16, matrices=4, num_warps=2, programs_per_sm=8),
    SinkhornConfig(max_n=32, matrices=1, num_warps=2, programs_per_sm=8),
    SinkhornConfig(max_n=64, matrices=1, num_warps=4, programs_per_sm=4),
)


class SinkhornPlan(NamedTuple):
    """One pass: its launch (none without elements), which operands it copies first, the memory of
    its result and, for the backward pass, of the sums on the way.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    result: Allocator
    sums: Allocator | None = None


def sinkhorn_forward(x: torch.Tensor, iterations: int, eps: float, domain: str) -> torch.Tensor:
    """The doubly stochastic matrices of logits ``x``, contiguous in x's shape and dtype."""
    return run(forward_plan, (x,), iterations, eps, domain)


def sinkhorn_backward(
    dy: torch.Tensor, x: torch.Tensor, iterations: int, eps: float, domain: str
) -> torch.Tensor:
    """The gradient of the logits ``x`` from that of the result, in x's shape and dtype."""
    return run(backward_plan, (dy, x), iterations, eps, domain)


def run(planner, operands: tuple, iterations: int, eps: float, domain: str) -> torch.Tensor:
    """Launch what the planner plans for these operands."""
    *_, x = operands
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return run(planner, operands, iterations, eps, domain)
    plan = planner(x.shape, layouts(*operands), iterations, domain, x.device)
    result = plan.result()
    if plan.launch is not None:
        if plan.copies:
            operands = contiguous_where(operands, plan.copies)
        sums = allocate(plan.sums)
        plan.launch((*operands, result) if sums is None else (*operands, result, sums), (eps,))
    return result


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout, ...],
    iterations: int,
    domain: str,
    device: torch.device,
) -> SinkhornPlan:
    """The plan for x of this layout."""
    (x,) = operands
    copies, result = to_copy(shape, x), allocator(shape, x[0], device)
    if not math.prod(shape):
        return SinkhornPlan(None, copies, result)
    n = shape[-1]
    config = sinkhorn_config(SINKHORN_FORWARD, n)
    matrices = count_rows(shape) // n
    launch = Launch(
        kernels.sinkhorn_forward_kernel,
        (cdiv(matrices, config.matrices),),
        device,
        (*row_strides(shape, x), matrices, iterations),
        dict(num_warps=config.num_warps),
        n=n,
        LOG=domain == "log",
        BLOCK=config.matrices,
        SIZE=power_of_2(n),
    )
    return SinkhornPlan(launch, copies, result)


@functools.lru_cache(maxsize=4096)
def backward_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout, ...],
    iterations: int,
    domain: str,
    device: torch.device,
) -> SinkhornPlan:
    """The plan for operands of these layouts: dy and x."""
    dy, x = operands
    copies, result = to_copy(shape, dy, x), allocator(shape, x[0], device)
    if not math.prod(shape):
        return SinkhornPlan(None, copies, result)
    n, size = shape[-1], power_of_2(shape[-1])
    config = sinkhorn_config(SINKHORN_BACKWARD, n)
    matrices = count_rows(shape) // n
    # As many programs as the GPU holds: each reuses its part of the sums from block to block.
    resident = config.programs_per_sm * device_properties(device).multiprocessors
    programs = min(cdiv(matrices, config.matrices), resident)
    launch = Launch(
        kernels.sinkhorn_backward_kernel,
        (programs,),
        device,
        (*row_strides(shape, dy), *row_strides(shape, x), matrices, iterations),
        dict(num_warps=config.num_warps),
        n=n,
        LOG=domain == "log",
        BLOCK=config.matrices,
        SIZE=size,
    )
    sums = allocator((programs, iterations, 2, config.matrices, size), torch.float32, device)
    return SinkhornPlan(launch, copies, result, sums)


def sinkhorn_config(table: tuple[SinkhornConfig, ...], n: int) -> SinkhornConfig:
    """The launch of matrices of n rows."""
    return next(config for config in table if n <= config.max_n)
