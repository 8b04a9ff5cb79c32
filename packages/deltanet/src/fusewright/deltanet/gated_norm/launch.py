"""The launches of the gated norm, forward and backward: their configuration and plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import interpreted
from .._core.launches import (
    Allocator,
    Launch,
    Layout,
    allocator,
    cdiv,
    contiguous_where,
    is_current,
    layouts,
)
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


class NormPlan(NamedTuple):
    """Both passes over rows of one layout: their launches, the memory of y or do, of dgate, and of
    each program's partial sums of dweight.
    """

    forward: Launch
    backward: Launch
    rows: Allocator
    gate: Allocator
    partial_sums: Allocator


def norm_forward(o: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """RMSNorm(o) weight silu(gate), contiguous."""
    if not is_current(o.device):
        with torch.cuda.device(o.device):
            return norm_forward(o, weight, gate, eps)
    operands = contiguous_where((o, weight, gate), (True,) * 3)
    plan = norm_plan(o.shape, o.dtype, layouts(*operands), o.device)
    y = plan.rows()
    if y.numel():
        plan.forward((*operands, y), (eps,))
    return y


def norm_backward(
    dy: Tensor, o: Tensor, weight: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(do, dweight, dgate)``, the last empty where there is no gate."""
    if not is_current(o.device):
        with torch.cuda.device(o.device):
            return norm_backward(dy, o, weight, gate, eps)
    operands = contiguous_where((dy, o, weight, gate), (True,) * 4)
    plan = norm_plan(o.shape, o.dtype, layouts(*operands), o.device)
    do, partial_sums = plan.rows(), plan.partial_sums()
    dgate = empty_grad(o) if gate is None else plan.gate()
    if do.numel():
        plan.backward((*operands, do, None if gate is None else dgate, partial_sums), (eps,))
    else:
        partial_sums.zero_()
    return do, partial_sums.sum(0).to(weight.dtype), dgate


@functools.lru_cache(maxsize=4096)
def norm_plan(
    shape: torch.Size,
    dtype: torch.dtype,
    operands: tuple[Layout | None, ...],
    device: torch.device,
) -> NormPlan:
    """The plan for contiguous operands of these layouts, the gate last."""
    gate = operands[-1]
    width = shape[-1]
    rows = shape[:-1].numel()
    block_d = power_of_2(width)
    block_r = max(1, NORM_ELEMENTS // block_d)
    programs = cdiv(rows, block_r)

    def launch(kernel):
        sizes = dict(UPCAST=interpreted(), D=width, BLOCK_R=block_r, BLOCK_D=block_d)
        return Launch(kernel, (programs,), device, (rows,), dict(num_warps=NORM_WARPS), **sizes)

    return NormPlan(
        launch(kernels.gated_norm_kernel),
        launch(kernels.gated_norm_backward_kernel),
        rows=allocator(shape, dtype, device),
        gate=allocator(shape, dtype if gate is None else gate[0], device),
        partial_sums=allocator((max(programs, 1), width), torch.float32, device),
    )
