"""The launches of a step of states and of the step back: their configuration and their plans."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.launches import Allocator, Launch, allocator, cdiv, is_current
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


class StepPlan(NamedTuple):
    """The launch, none without numbers, and the memory of a state and of what is shown of it."""

    launch: Launch | None
    state: Allocator
    shown: Allocator


def advance(
    before: Tensor, delta: Tensor, gain: float, one: float, saturated: Tensor
) -> tuple[Tensor, Tensor]:
    """The next state, and as it is shown; sets ``saturated``, 0-d bool, where that leaves the
    range. States are int32, contiguous; delta is fp32.
    """
    if not is_current(delta.device):
        with torch.cuda.device(delta.device):
            return advance(before, delta, gain, one, saturated)
    plan = step_plan("advance", delta.shape, gain, one, delta.device)
    new, shown = plan.state(), plan.shown()
    if plan.launch is not None:
        plan.launch((before, delta.contiguous(), new, shown, saturated.view(torch.int8)))
    return new, shown


def undo(after: Tensor, delta: Tensor, gain: float, one: float) -> tuple[Tensor, Tensor]:
    """The state whose step led to ``after``, and as it is shown."""
    if not is_current(delta.device):
        with torch.cuda.device(delta.device):
            return undo(after, delta, gain, one)
    plan = step_plan("undo", delta.shape, gain, one, delta.device)
    before, shown = plan.state(), plan.shown()
    if plan.launch is not None:
        plan.launch((after, delta.contiguous(), before, shown))
    return before, shown


@functools.lru_cache(maxsize=4096)
def step_plan(
    which: str, shape: tuple[int, ...], gain: float, one: float, device: torch.device
) -> StepPlan:
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
    return StepPlan(
        launch if count else None,
        state=allocator(shape, torch.int32, device),
        shown=allocator(shape, torch.float32, device),
    )
