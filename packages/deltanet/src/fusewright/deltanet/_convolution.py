"""The short convolution's plans and launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ._backends import interpreted
from ._configs import CONVOLUTION, CONVOLUTION_BACKWARD
from ._convolution_kernels import _convolution_backward_kernel, _convolution_kernel
from ._launch import Allocate, Launch, is_current, memory
from ._registration import empty_grad

Tensor = torch.Tensor


class Plan(NamedTuple):
    """One pass over [B, T, channels]."""

    run: Launch
    y: Allocate
    shares: Allocate


def launch_short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> Tensor:
    """silu(conv(x)), contiguous."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_short_convolution(x, weight, bias, place, heads)
    x, weight = x.contiguous(), weight.contiguous()
    forward = plan(x.shape, x.dtype, x.device, weight.shape[1], heads, backward=False)
    y = forward.y()
    if y.numel():
        forward.run((x, weight, bias, place, y))
    return y


def launch_short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)``, the last empty where there is no bias."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_short_convolution_backward(dy, x, weight, bias, place, heads)
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    backward = plan(x.shape, x.dtype, x.device, weight.shape[1], heads, backward=True)
    dx, shares = backward.y(), backward.shares()
    if dx.numel():
        backward.run((dy, x, weight, bias, place, dx, shares))
    else:
        shares.zero_()
    dweight = shares[:, :-1].sum(0).T.contiguous().to(weight.dtype)
    if bias is None:
        return dx, dweight, empty_grad(dweight)
    return dx, dweight, shares[:, -1].sum(0).to(bias.dtype)


@functools.lru_cache(maxsize=4096)
def plan(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    taps: int,
    heads: int,
    *,
    backward: bool,
) -> Plan:
    """The plan for contiguous tensors of this shape; without ``heads`` the table cuts channels."""
    config = CONVOLUTION_BACKWARD if backward else CONVOLUTION
    batch, tokens, channels = shape
    width = channels // heads if heads else config.channels
    block_d = triton.next_power_of_2(width)
    block_t = max(1, config.elements // block_d)
    rows = batch * triton.cdiv(tokens, block_t)
    run = Launch(
        _convolution_backward_kernel if backward else _convolution_kernel,
        (rows, triton.cdiv(channels, width)),
        device,
        (tokens, channels, width),
        dict(num_warps=config.num_warps),
        UPCAST=interpreted(),
        UNIT=heads > 0,
        TAPS=taps,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
    )
    shares = memory((max(rows, 1), taps + 1, channels), torch.float32, device)
    return Plan(run, memory(shape, dtype, device), shares)
