"""The launches of softmax_gradient_ and scaled: their configurations and their plans."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Launch, Layout, Plan, allocator, cdiv, current_device, layouts
from .._core.lazy import lazy_module
from .._core.precision import power_of_2

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class SoftmaxConfig(NamedTuple):
    """One program takes a row, ``deep`` times ``lanes`` columns at a time; a small vocabulary has
    fewer lanes.
    """

    deep: int
    lanes: int
    num_warps: int


# Source: docs/decisions/0007-vocabulary-loss-h200.csv.
SOFTMAX = SoftmaxConfig(deep=16, lanes=512, num_warps=8)


class ScaledConfig(NamedTuple):
    """One program takes ``block`` numbers."""

    block: int
    num_warps: int


# Source: docs/decisions/0007-scaled-h200.csv.
SCALED = ScaledConfig(block=1024, num_warps=4)


def softmax_gradient_(logits: Tensor, targets: Tensor, *, with_gradient: bool) -> Tensor:
    """log softmax of each row at its target, in fp32; the logits become their gradient.

    Args:
        logits: ``[N, V]``, fp32, bf16 or fp16, rows contiguous. With ``with_gradient`` they hold
            softmax(logits) - one_hot(targets) afterwards.
        targets: ``[N]``, int64. A row is NaN where its target is no number of a column.
        with_gradient: whether the logits are written.
    """
    if logits.is_cuda and logits.device.index != current_device():
        with torch.cuda.device(logits.device):
            return softmax_gradient_(logits, targets, with_gradient=with_gradient)
    plan = softmax_plan(logits.shape, layouts(logits), with_gradient, logits.device)
    return plan.run((logits, targets.contiguous()))[0]


@functools.lru_cache(maxsize=4096)
def softmax_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    with_gradient: bool,
    device: torch.device,
) -> Plan:
    """The plan for logits of this layout; targets are made contiguous."""
    rows, vocabulary = shape
    (logits,) = operands
    assert logits is not None
    log_p = allocator((rows,), torch.float32, device)
    if not rows:
        return Plan(None, (), (log_p,))
    launch = Launch(
        kernels.softmax_gradient_kernel,
        (rows,),
        device,
        (vocabulary, logits[1][0]),
        dict(num_warps=SOFTMAX.num_warps),
        HAS_GRADIENT=with_gradient,
        DEEP=SOFTMAX.deep,
        LANES=min(SOFTMAX.lanes, max(16, power_of_2(cdiv(vocabulary, SOFTMAX.deep)))),
    )
    return Plan(launch, (), (log_p,))


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a number, computed in fp32 and rounded once.

    Args:
        x: contiguous, fp32, bf16 or fp16.
        factor: one number in fp32, on x's device.
        dtype: of the result, fp32, bf16 or fp16.
    """
    if x.is_cuda and x.device.index != current_device():
        with torch.cuda.device(x.device):
            return scaled(x, factor, dtype)
    return scaled_plan(x.shape, layouts(x), dtype, x.device).run((x, factor))[0]


@functools.lru_cache(maxsize=4096)
def scaled_plan(
    shape: tuple[int, ...],
    operands: tuple[Layout | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """The plan for numbers of this layout."""
    size = math.prod(shape)
    out = allocator(shape, dtype, device)
    if not size:
        return Plan(None, (), (out,))
    launch = Launch(
        kernels.scaled_kernel,
        (cdiv(size, SCALED.block),),
        device,
        (size,),
        dict(num_warps=SCALED.num_warps),
        BLOCK=SCALED.block,
    )
    return Plan(launch, (), (out,))
