"""The short convolution's plans and launches."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ._backends import card_of, interpreted
from ._configs import CONVOLUTION, CONVOLUTION_BACKWARD, STRIPS, STRIPS_PROGRAMS
from ._convolution_kernels import _convolution_backward_kernel, _convolution_kernel
from ._launch import Allocate, Kind, Launch, copied, is_current, kinds, memory
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
    operands = copied((x, weight, bias, place), (True,) * 4)
    sizes = x.shape, weight.shape[1], heads
    forward = plan(*sizes, x.dtype, kinds(*operands), x.device, backward=False)
    y = forward.y()
    if y.numel():
        forward.run((*operands, y))
    return y


def launch_short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)``, the last empty where there is no bias."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return launch_short_convolution_backward(dy, x, weight, bias, place, heads)
    operands = copied((dy, x, weight, bias, place), (True,) * 5)
    sizes = x.shape, weight.shape[1], heads
    backward = plan(*sizes, x.dtype, kinds(*operands), x.device, backward=True)
    dx, shares = backward.y(), backward.shares()
    if dx.numel():
        backward.run((*operands, dx, shares))
    else:
        shares.zero_()
    dweight = shares[:, :-1].sum(0).T.contiguous().to(weight.dtype)
    if bias is None:
        return dx, dweight, empty_grad(dweight)
    return dx, dweight, shares[:, -1].sum(0).to(bias.dtype)


@functools.lru_cache(maxsize=4096)
def plan(
    shape: torch.Size,
    taps: int,
    heads: int,
    dtype: torch.dtype,
    operands: tuple[Kind | None, ...],
    device: torch.device,
    *,
    backward: bool,
) -> Plan:
    """The plan for contiguous operands of these kinds; without ``heads`` the table cuts
    channels.
    """
    config = CONVOLUTION_BACKWARD if backward else CONVOLUTION
    batch, tokens, channels = shape
    width = channels // heads if heads else config.channels
    groups = triton.cdiv(channels, width)
    block_d = triton.next_power_of_2(width)
    block = max(1, config.elements // block_d)
    constants: dict[str, Any] = dict(UPCAST=interpreted(), UNIT=heads > 0, TAPS=taps)
    if backward:
        wanted = STRIPS_PROGRAMS * card_of(device).multiprocessors
        programs_of = {x: triton.cdiv(batch * triton.cdiv(tokens, x), block) for x in STRIPS}
        enough = (x for x in STRIPS if programs_of[x] * groups >= wanted)
        length = next(enough, STRIPS[-1])
        programs, kernel = programs_of[length], _convolution_backward_kernel
        sizes: tuple[int, ...] = (batch, tokens, triton.cdiv(tokens, length), channels, width)
        constants |= dict(LENGTH=length, BLOCK_S=block)
    else:
        programs, kernel = batch * triton.cdiv(tokens, block), _convolution_kernel
        sizes = (tokens, channels, width)
        constants |= dict(BLOCK_T=block)
    run = Launch(
        kernel,
        (programs, groups),
        device,
        sizes,
        dict(num_warps=config.num_warps),
        **constants,
        BLOCK_D=block_d,
    )
    shares = memory((max(programs, 1), taps + 1, channels), torch.float32, device)
    return Plan(run, memory(shape, dtype, device), shares)
