"""The op that registration.py registers in every style: RMS normalisation over the last axis.

y = x * rstd * weight with rstd = (mean(x^2) + eps)^(-1/2), as a raw forward (x, weight, eps) ->
(y, rstd) and a raw backward (dy, x, weight, rstd) -> (dx, dweight): in plain torch, in Triton, and
as the allocations alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-6
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORWARD = "(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)"
BACKWARD = "(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dweight)"


def reference_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return x * rstd.unsqueeze(-1) * weight, rstd


def reference_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    xhat = x * rstd.unsqueeze(-1)
    dxhat = dy * weight
    dx = (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx, (dy * xhat).reshape(-1, x.shape[-1]).sum(0)


def allocate_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def allocate_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@triton.jit
def forward_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, eps, D, BLOCK: tl.constexpr):
    """One program normalises one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    x = tl.load(x_ptr + row * D + column, mask, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask, 0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * D + column, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, D, share, BLOCK: tl.constexpr
):
    """One program walks its share of consecutive rows and keeps their part of dweight."""
    column = tl.arange(0, BLOCK)
    inside = column < D
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for step in range(0, share):
        row = tl.program_id(0).to(tl.int64) * share + step
        mask = inside & (row < rows)
        rstd = tl.load(rstd_ptr + row, row < rows, 0.0)
        xhat = tl.load(x_ptr + row * D + column, mask, 0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + row * D + column, mask, 0.0).to(tl.float32)
        dxhat = dy * weight
        dx = (dxhat - xhat * (tl.sum(dxhat * xhat) / D)) * rstd
        tl.store(dx_ptr + row * D + column, dx.to(dx_ptr.dtype.element_ty), mask)
        dweight += dy * xhat
    tl.store(partial_ptr + tl.program_id(0) * D + column, dweight, inside)


def triton_forward(
    x: Tensor, weight: Tensor, eps: float, kernel: Any = forward_kernel
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, rstd = allocate_forward(x, weight, eps)
    D = x.shape[-1]
    kernel[(rstd.numel(),)](x, weight, y, rstd, eps, D, BLOCK=triton.next_power_of_2(D))
    return y, rstd


def triton_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, kernel: Any = backward_kernel
) -> tuple[Tensor, Tensor]:
    # Autograd hands over an expanded dy for y.sum().
    dy, x = dy.contiguous(), x.contiguous()
    D, rows = x.shape[-1], rstd.numel()
    share = triton.cdiv(rows, 256)
    programs = triton.cdiv(rows, share)
    dx, partial = torch.empty_like(x), x.new_empty(programs, D, dtype=torch.float32)
    kernel[(programs,)](
        dy, x, weight, rstd, dx, partial, rows, D, share, BLOCK=triton.next_power_of_2(D)
    )
    return dx, partial.sum(0).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class Raw:
    """What a style registers: the two raw functions for CPU and for CUDA tensors."""

    forward: dict[str, Callable[..., Any]]
    backward: dict[str, Callable[..., Any]]


KERNELS = Raw(
    {"CPU": triton_forward if INTERPRETED else reference_forward, "CUDA": triton_forward},
    {"CPU": triton_backward if INTERPRETED else reference_backward, "CUDA": triton_backward},
)
# A raw op that only allocates: what is left of a call's time is the style's own.
ALLOCATE = Raw(
    {"CPU": allocate_forward, "CUDA": allocate_forward},
    {"CPU": allocate_backward, "CUDA": allocate_backward},
)
