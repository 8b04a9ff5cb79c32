"""The launches of the gated norm, forward and backward: their configuration and plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from .._core.backends import interpreted
from .._core.launches import Allocator, Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .._core.registration import empty_grad

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor

# One program holds this many elements, in whole rows. Unmeasured.
NORM_ELEMENTS = 2048
NORM_WARPS = 4


def norm_forward(o: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """RMSNorm(o) weight silu(gate), contiguous."""
    operands = (o, weight, gate)
    return norm_plan(o.shape, layouts(*operands), o.device, backward=False).run(operands, (eps,))[0]


def norm_backward(
    dy: Tensor, o: Tensor, weight: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(do, dweight, dgate)``, the last empty where there is no gate."""
    operands = (dy, o, weight, gate)
    plan = norm_plan(o.shape, layouts(*operands), o.device, backward=True)
    do, dgate, partial_sums = plan.run(operands, (eps,))
    if plan.launch is None:
        partial_sums.zero_()
    return do, partial_sums.sum(0).to(weight.dtype), empty_grad(o) if dgate is None else dgate


@functools.lru_cache(maxsize=4096)
def norm_plan(
    shape: torch.Size,
    operands: tuple[Layout | None, ...],
    device: torch.device,
    *,
    backward: bool,
) -> Plan:
    """The plan of one pass, for contiguous copies of operands of these layouts. It writes y, or do,
    dgate and each program's partial sum of dweight.
    """
    o, _, gate = operands[-3:]
    assert o is not None
    width = shape[-1]
    block_d = power_of_2(width)
    block_r = max(1, NORM_ELEMENTS // block_d)
    rows = shape[:-1].numel()
    programs = cdiv(rows, block_r)
    launch = Launch(
        kernels.gated_norm_backward_kernel if backward else kernels.gated_norm_kernel,
        (programs,),
        device,
        (rows,),
        dict(num_warps=NORM_WARPS),
        UPCAST=interpreted(),
        D=width,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    outputs: list[Allocator | None] = [allocator(shape, o[0], device)]
    if backward:
        outputs += [
            None if gate is None else allocator(shape, gate[0], device),
            allocator((max(programs, 1), width), torch.float32, device),
        ]
    return Plan(launch if shape.numel() else None, (True,) * len(operands), tuple(outputs))
