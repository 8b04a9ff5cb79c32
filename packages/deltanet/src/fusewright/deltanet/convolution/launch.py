"""The launches of the short convolution, forward and backward: their configurations and plans."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import Launch, Layout, Plan, allocator, cdiv, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2
from .._core.registration import empty_grad

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class ConvolutionConfig(NamedTuple):
    """One program holds ``elements`` elements: of one head's columns or, without heads, of
    ``channels`` channels.
    """

    elements: int
    channels: int
    num_warps: int


# Source: results/tuning-convolution-h200-torch2.11-triton3.6.csv; unmeasured on other GPUs.
CONVOLUTION = ConvolutionConfig(elements=2048, channels=128, num_warps=4)
CONVOLUTION_BACKWARD = ConvolutionConfig(elements=256, channels=128, num_warps=2)
# Backward, a program loops over a strip of this many tokens: the first length that gives each
# multiprocessor six programs, or else the last.
STRIPS = (64, 32, 16)
STRIPS_PROGRAMS = 6


def convolution_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> Tensor:
    """silu(conv(x)), contiguous."""
    operands = (x, weight, bias, place)
    plan = convolution_plan(
        x.shape, weight.shape[1], heads, layouts(*operands), x.device, backward=False
    )
    return plan.run(operands)[0]


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)``, the last empty where there is no bias."""
    operands = (dy, x, weight, bias, place)
    plan = convolution_plan(
        x.shape, weight.shape[1], heads, layouts(*operands), x.device, backward=True
    )
    dx, partial_sums = plan.run(operands)
    if plan.launch is None:
        partial_sums.zero_()
    dweight = partial_sums[:, :-1].sum(0).T.contiguous().to(weight.dtype)
    if bias is None:
        return dx, dweight, empty_grad(dweight)
    return dx, dweight, partial_sums[:, -1].sum(0).to(bias.dtype)


@functools.lru_cache(maxsize=4096)
def convolution_plan(
    shape: torch.Size,
    taps: int,
    heads: int,
    operands: tuple[Layout, ...],
    device: torch.device,
    *,
    backward: bool,
) -> Plan:
    """The plan of one pass over [B, T, channels], for contiguous copies of operands of these
    layouts. It writes y, or dx and each program's partial sums of the gradients of taps and bias.
    """
    config = CONVOLUTION_BACKWARD if backward else CONVOLUTION
    batch, tokens, channels = shape
    width = channels // heads if heads else config.channels
    groups = cdiv(channels, width)
    block_d = power_of_2(width)
    block = max(1, config.elements // block_d)
    constants: dict[str, Any] = dict(UPCAST=interpreted(), UNIT=heads > 0, TAPS=taps)
    if backward:
        wanted = STRIPS_PROGRAMS * device_properties(device).multiprocessors
        programs_of = {x: cdiv(batch * cdiv(tokens, x), block) for x in STRIPS}
        enough = (x for x in STRIPS if programs_of[x] * groups >= wanted)
        length = next(enough, STRIPS[-1])
        programs, kernel = programs_of[length], kernels.convolution_backward_kernel
        sizes: tuple[int, ...] = (batch, tokens, cdiv(tokens, length), channels, width)
        constants |= dict(LENGTH=length, BLOCK_S=block)
    else:
        programs, kernel = batch * cdiv(tokens, block), kernels.convolution_kernel
        sizes = (tokens, channels, width)
        constants |= dict(BLOCK_T=block)
    launch = Launch(
        kernel,
        (programs, groups),
        device,
        sizes,
        dict(num_warps=config.num_warps),
        **constants,
        BLOCK_D=block_d,
    )
    x_dtype = operands[-4][0]
    outputs = [allocator(shape, x_dtype, device)]
    if backward:
        partial_sums = (max(programs, 1), taps + 1, channels)
        outputs.append(allocator(partial_sums, torch.float32, device))
    return Plan(launch if shape.numel() else None, (True,) * len(operands), tuple(outputs))
