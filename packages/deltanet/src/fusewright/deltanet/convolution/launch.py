"""The launches of the short convolution, forward and backward: their configurations and plans."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.backends import device_properties, interpreted
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


class ConvolutionPlan(NamedTuple):
    """One pass over [B, T, channels]: its launch, the memory of y or dx and, backward, that of
    each program's partial sums of the gradients of taps and bias.
    """

    launch: Launch
    result: Allocator
    partial_sums: Allocator


def convolution_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> Tensor:
    """silu(conv(x)), contiguous."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return convolution_forward(x, weight, bias, place, heads)
    operands = contiguous_where((x, weight, bias, place), (True,) * 4)
    plan = convolution_plan(
        x.shape, weight.shape[1], heads, x.dtype, layouts(*operands), x.device, backward=False
    )
    y = plan.result()
    if y.numel():
        plan.launch((*operands, y))
    return y


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dweight, dbias)``, the last empty where there is no bias."""
    if not is_current(x.device):
        with torch.cuda.device(x.device):
            return convolution_backward(dy, x, weight, bias, place, heads)
    operands = contiguous_where((dy, x, weight, bias, place), (True,) * 5)
    plan = convolution_plan(
        x.shape, weight.shape[1], heads, x.dtype, layouts(*operands), x.device, backward=True
    )
    dx, partial_sums = plan.result(), plan.partial_sums()
    if dx.numel():
        plan.launch((*operands, dx, partial_sums))
    else:
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
    dtype: torch.dtype,
    operands: tuple[Layout | None, ...],
    device: torch.device,
    *,
    backward: bool,
) -> ConvolutionPlan:
    """The plan for contiguous operands of these layouts."""
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
    partial_sums = allocator((max(programs, 1), taps + 1, channels), torch.float32, device)
    return ConvolutionPlan(launch, allocator(shape, dtype, device), partial_sums)
