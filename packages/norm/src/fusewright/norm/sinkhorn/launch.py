"""The launches of sinkhorn_knopp, forward and backward: their configurations and plans."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import Allocator, Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .._core.rows import read_strides, to_copy
from ..common.rows import count_rows

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


def sinkhorn_forward(x: torch.Tensor, iterations: int, eps: float, domain: str) -> torch.Tensor:
    """The doubly stochastic matrices of logits ``x``, contiguous in x's shape and dtype."""
    plan = sinkhorn_plan(x.shape, layouts(x), iterations, domain, x.device)
    return plan.run((x,), (eps,))[0]


def sinkhorn_backward(
    dy: torch.Tensor, x: torch.Tensor, iterations: int, eps: float, domain: str
) -> torch.Tensor:
    """The gradient of the logits ``x`` from that of the result, in x's shape and dtype."""
    plan = sinkhorn_plan(x.shape, layouts(dy, x), iterations, domain, x.device)
    return plan.run((dy, x), (eps,))[0]


@functools.lru_cache(maxsize=4096)
def sinkhorn_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout, ...],
    iterations: int,
    domain: str,
    device: torch.device,
) -> Plan:
    """The plan for operands of these layouts: x; or dy and x, for the backward pass, which behind
    the gradient has the memory of the sums on the way.
    """
    *_, x = operands
    backward, n = len(operands) > 1, shape[-1]
    config = sinkhorn_config(SINKHORN_BACKWARD if backward else SINKHORN_FORWARD, n)
    programs = cdiv(math.prod(shape[:-2]), config.matrices)
    outputs: tuple[Allocator, ...] = (allocator(shape, x[0], device),)
    if backward:
        # As many programs as the GPU holds: each reuses its part of the sums from block to block.
        resident = config.programs_per_sm * device_properties(device).multiprocessors
        programs = min(programs, resident)
        sums = (programs, iterations, 2, config.matrices, power_of_2(max(n, 1)))
        outputs += (allocator(sums, torch.float32, device),)
    launch = None
    if math.prod(shape):
        strides = [stride for operand in operands for stride in read_strides(shape, operand)]
        launch = Launch(
            kernels.sinkhorn_backward_kernel if backward else kernels.sinkhorn_forward_kernel,
            (programs,),
            device,
            (*strides, count_rows(shape) // n, iterations),
            dict(num_warps=config.num_warps),
            n=n,
            LOG=domain == "log",
            BLOCK=config.matrices,
            SIZE=power_of_2(n),
        )
    return Plan(launch, to_copy(shape, *operands), outputs)


def sinkhorn_config(table: tuple[SinkhornConfig, ...], n: int) -> SinkhornConfig:
    """The launch of matrices of n rows."""
    return next(config for config in table if n <= config.max_n)
