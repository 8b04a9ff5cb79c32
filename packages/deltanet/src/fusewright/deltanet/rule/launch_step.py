"""The launch of gated_delta_rule_step: its configuration and plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from .._core.backends import interpreted
from .._core.launches import Launch, Plan, allocator, cdiv
from .._core.lazy import lazy_module
from .._core.precision import power_of_2

if TYPE_CHECKING:
    from . import kernels_step
else:
    kernels_step = lazy_module(__package__, "kernels_step")

Tensor = torch.Tensor

# How many columns of a state one program of the decode step updates. For 64 rows of 8 heads 32 are
# 3 % faster, with half as many programs. Source: results/tuning-h200-torch2.11-triton3.6.csv.
STEP_BLOCK_V = 16


def step_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``(o, state after the token)``."""
    operands = (q, k, v, g, beta, state)
    plan = step_plan(state.shape, q.shape[1], q.dtype, state.dtype, q.device)
    return plan.run(operands, (scale,))


@functools.lru_cache(maxsize=4096)
def step_plan(
    shape: torch.Size,
    key_heads: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """The plan for contiguous copies of operands of this dtype and a state of this shape."""
    batch, heads, keys, width = shape
    launch = Launch(
        kernels_step.step_kernel,
        (batch * heads * cdiv(width, STEP_BLOCK_V),),
        device,
        (heads,),
        dict(num_warps=4),
        UPCAST=interpreted(),
        GROUP=heads // key_heads,
        K=keys,
        V=width,
        BLOCK_K=power_of_2(keys),
        BLOCK_V=STEP_BLOCK_V,
    )
    o = allocator((batch, heads, width), dtype, device)
    outputs = (o, allocator(shape, state_dtype, device))
    return Plan(launch if shape.numel() else None, (True,) * 6, outputs)
