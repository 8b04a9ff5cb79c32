"""The launches of sinkhorn_knopp, forward and backward: plans, allocates and launches."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton

from ._backends import card_of
from ._configs import SINKHORN_BACKWARD, SINKHORN_FORWARD, power_of_2, sinkhorn_config
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, made, memory
from ._rows import count_rows, to_copy, walk
from ._sinkhorn_kernels import _sinkhorn_backward_kernel, _sinkhorn_forward_kernel


class SinkhornPlan(NamedTuple):
    """One pass: its launch (none without elements), which operands it copies first, the memory of
    its result and, for the backward pass, of the sums on the way.
    """

    launch: Launch | None
    copies: tuple[bool, ...]
    result: Allocate
    sums: Allocate | None = None


def launch_sinkhorn_forward(
    x: torch.Tensor, iterations: int, eps: float, domain: str
) -> torch.Tensor:
    """The doubly stochastic matrices of logits ``x``, contiguous in x's shape and dtype."""
    return run(forward_plan, (x,), iterations, eps, domain)


def launch_sinkhorn_backward(
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
    plan = planner(x.shape, kinds(*operands), iterations, domain, x.device)
    result = plan.result()
    if plan.launch is not None:
        if plan.copies:
            operands = copied(operands, plan.copies)
        sums = made(plan.sums)
        plan.launch((*operands, result) if sums is None else (*operands, result, sums), (eps,))
    return result


@functools.lru_cache(maxsize=4096)
def forward_plan(
    shape: tuple[int, ...],
    operands: tuple[Kind, ...],
    iterations: int,
    domain: str,
    device: torch.device,
) -> SinkhornPlan:
    """The plan for x of this kind."""
    (x,) = operands
    copies, result = to_copy(shape, x), memory(shape, x[0], device)
    if not math.prod(shape):
        return SinkhornPlan(None, copies, result)
    n = shape[-1]
    config = sinkhorn_config(SINKHORN_FORWARD, n)
    matrices = count_rows(shape) // n
    launch = Launch(
        _sinkhorn_forward_kernel,
        (triton.cdiv(matrices, config.matrices),),
        device,
        (*walk(shape, x), matrices, iterations),
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
    operands: tuple[Kind, ...],
    iterations: int,
    domain: str,
    device: torch.device,
) -> SinkhornPlan:
    """The plan for operands of these kinds: dy and x."""
    dy, x = operands
    copies, result = to_copy(shape, dy, x), memory(shape, x[0], device)
    if not math.prod(shape):
        return SinkhornPlan(None, copies, result)
    n, size = shape[-1], power_of_2(shape[-1])
    config = sinkhorn_config(SINKHORN_BACKWARD, n)
    matrices = count_rows(shape) // n
    # As many programs as the card holds: each reuses its part of the sums from block to block.
    resident = config.programs_per_sm * card_of(device).multiprocessors
    programs = min(triton.cdiv(matrices, config.matrices), resident)
    launch = Launch(
        _sinkhorn_backward_kernel,
        (programs,),
        device,
        (*walk(shape, dy), *walk(shape, x), matrices, iterations),
        dict(num_warps=config.num_warps),
        n=n,
        LOG=domain == "log",
        BLOCK=config.matrices,
        SIZE=size,
    )
    sums = memory((programs, iterations, 2, config.matrices, size), torch.float32, device)
    return SinkhornPlan(launch, copies, result, sums)
