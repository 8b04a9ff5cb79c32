"""The launches of a step of states and of the step back: their configuration and their plans."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import Launch, Plan, allocator, cdiv, current_device
from .._core.lazy import lazy_module

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class StepConfig(NamedTuple):
    """One program takes ``block`` numbers of a state."""

    block: int
    num_warps: int


# Source: unmeasured.
STEP = StepConfig(block=2048, num_warps=8)


def advance(
    before: Tensor, delta: Tensor, gain: float, one: float, saturated: Tensor
) -> tuple[Tensor, Tensor]:
    """The next state, and as it is shown; sets ``saturated``, 0-d bool, where that leaves the
    range. States are int32; delta is fp32.
    """
    if delta.is_cuda and delta.device.index != current_device():
        with torch.cuda.device(delta.device):
            return advance(before, delta, gain, one, saturated)
    plan = step_plan("advance", delta.shape, gain, one, delta.device)
    return plan.run((before.contiguous(), delta.contiguous(), saturated.view(torch.int8)))


def undo(after: Tensor, delta: Tensor, gain: float, one: float) -> tuple[Tensor, Tensor]:
    """The state whose step led to ``after``, and as it is shown."""
    if delta.is_cuda and delta.device.index != current_device():
        with torch.cuda.device(delta.device):
            return undo(after, delta, gain, one)
    plan = step_plan("undo", delta.shape, gain, one, delta.device)
    return plan.run((after.contiguous(), delta.contiguous()))


@functools.lru_cache(maxsize=4096)
def step_plan(
    which: str, shape: tuple[int, ...], gain: float, one: float, device: torch.device
) -> Plan:
    """The plan of one of the two for states of this shape."""
    count = math.prod(shape)
    # The kernels take both floats behind the integer: a plan is for one of each.
    numbers: tuple[Any, ...] = (count, gain, one)
    launch = Launch(
        kernels.advance_kernel if which == "advance" else kernels.undo_kernel,
        (cdiv(count, STEP.block),),
        device,
        numbers,
        dict(num_warps=STEP.num_warps),
        BLOCK=STEP.block,
    )
    outputs = allocator(shape, torch.int32, device), allocator(shape, torch.float32, device)
    return Plan(launch if count else None, (), outputs)
