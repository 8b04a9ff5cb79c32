"""The launch of gated_delta_rule_step: its configuration and plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from .._core.backends import interpreted
from .._core.launches import Launch, cdiv, is_current
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
    if not is_current(q.device):
        with torch.cuda.device(q.device):
            return step_forward(q, k, v, g, beta, state, scale)
    operands = [x.contiguous() for x in (q, k, v, g, beta, state)]
    o, end = q.new_empty(v.shape), torch.empty_like(operands[-1])
    if end.numel():
        batch, heads, keys, width = state.shape
        launch = step_plan(batch, heads, heads // q.shape[1], keys, width, q.dtype, q.device)
        launch((*operands, o, end), (scale,))
    return o, end


@functools.lru_cache(maxsize=4096)
def step_plan(
    batch: int,
    heads: int,
    group: int,
    keys: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The launch for contiguous tensors of these sizes and this dtype."""
    return Launch(
        kernels_step.step_kernel,
        (batch * heads * cdiv(width, STEP_BLOCK_V),),
        device,
        (heads,),
        dict(num_warps=4),
        UPCAST=interpreted(),
        GROUP=group,
        K=keys,
        V=width,
        BLOCK_K=power_of_2(keys),
        BLOCK_V=STEP_BLOCK_V,
    )
