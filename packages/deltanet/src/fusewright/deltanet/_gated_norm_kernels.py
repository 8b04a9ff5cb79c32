"""Triton kernels of the gated norm, their plan and launchers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ._backends import interpreted
from ._configs import NORM_ELEMENTS, NORM_WARPS
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
from ._registration import empty_grad
from ._tiles import as_operand

Tensor = torch.Tensor


@triton.jit
def load_rows(x_ptr, at, inside):
    return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("rows",))
def _gated_norm_kernel(
    o_ptr,
    weight_ptr,
    gate_ptr,
    y_ptr,
    eps,
    rows,
    UPCAST: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes BLOCK_R rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (col < D)[None, :]
    at = row[:, None] * D + col[None, :]
    o = load_rows(o_ptr, at, inside)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None]
    y *= tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        gate = load_rows(gate_ptr, at, inside)
        y *= gate * tl.sigmoid(gate)
    tl.store(y_ptr + at, as_operand(y, y_ptr.dtype.element_ty, UPCAST), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def _gated_norm_backward_kernel(
    dy_ptr,
    o_ptr,
    weight_ptr,
    gate_ptr,
    do_ptr,
    dgate_ptr,
    shares_ptr,
    eps,
    rows,
    UPCAST: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes the gradients of BLOCK_R rows and its share of the weight's."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (col < D)[None, :]
    at = row[:, None] * D + col[None, :]
    o = load_rows(o_ptr, at, inside)
    dy = load_rows(dy_ptr, at, inside)
    weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    rstd = tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None]
    normed = o * rstd
    if gate_ptr is not None:
        gate = load_rows(gate_ptr, at, inside)
        s = tl.sigmoid(gate)
        dgate = dy * normed * weight * s * (1.0 + gate * (1.0 - s))
        dgate = as_operand(dgate, dgate_ptr.dtype.element_ty, UPCAST)
        tl.store(dgate_ptr + at, dgate, mask=inside)
        dy *= gate * s
    share = shares_ptr + tl.program_id(0).to(tl.int64) * D + col
    tl.store(share, tl.sum(dy * normed, 0), mask=col < D)
    dy *= weight
    do = rstd * (dy - normed * (tl.sum(dy * normed, 1) / D)[:, None])
    tl.store(do_ptr + at, as_operand(do, do_ptr.dtype.element_ty, UPCAST), mask=inside)


class Plan(NamedTuple):
    """Both passes over rows of one kind."""

    forward: Launch
    backward: Launch
    rows: Allocate
    gate: Allocate
    shares: Allocate


def launch_gated_norm(o: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """RMSNorm(o) weight silu(gate), contiguous."""
    if not is_current(o.device):
        with torch.cuda.device(o.device):
            return launch_gated_norm(o, weight, gate, eps)
    operands = copied((o, weight, gate), (True,) * 3)
    found = plan(o.shape, o.dtype, kinds(*operands), o.device)
    y = found.rows()
    if y.numel():
        found.forward((*operands, y), (eps,))
    return y


def launch_gated_norm_backward(
    dy: Tensor, o: Tensor, weight: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(do, dweight, dgate)``, the last empty where there is no gate."""
    if not is_current(o.device):
        with torch.cuda.device(o.device):
            return launch_gated_norm_backward(dy, o, weight, gate, eps)
    operands = copied((dy, o, weight, gate), (True,) * 4)
    found = plan(o.shape, o.dtype, kinds(*operands), o.device)
    do, shares = found.rows(), found.shares()
    dgate = empty_grad(o) if gate is None else found.gate()
    if do.numel():
        found.backward((*operands, do, None if gate is None else dgate, shares), (eps,))
    else:
        shares.zero_()
    return do, shares.sum(0).to(weight.dtype), dgate


@functools.lru_cache(maxsize=4096)
def plan(
    shape: torch.Size,
    dtype: torch.dtype,
    operands: tuple[Kind | None, ...],
    device: torch.device,
) -> Plan:
    """The plan for contiguous operands of these kinds, the gate last."""
    gate = operands[-1]
    width = shape[-1]
    rows = shape[:-1].numel()
    block_d = triton.next_power_of_2(width)
    block_r = max(1, NORM_ELEMENTS // block_d)
    programs = triton.cdiv(rows, block_r)

    def launch(kernel):
        sizes = dict(UPCAST=interpreted(), D=width, BLOCK_R=block_r, BLOCK_D=block_d)
        return Launch(kernel, (programs,), device, (rows,), dict(num_warps=NORM_WARPS), **sizes)

    return Plan(
        launch(_gated_norm_kernel),
        launch(_gated_norm_backward_kernel),
        memory(shape, dtype, device),
        memory(shape, dtype if gate is None else gate[0], device),
        memory((max(programs, 1), width), torch.float32, device),
    )
