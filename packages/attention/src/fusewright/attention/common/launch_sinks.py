"""The launch that ends the gradient of sinks, behind those of any backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import Allocator, Launch, allocator
from .._core.lazy import lazy_module
from .problem import Problem

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")


class AddSinksConfig(NamedTuple):
    """One program adds the partial sums of a head, ``block`` at a time."""

    block: int
    num_warps: int


# Unmeasured.
ADD_SINKS = AddSinksConfig(block=256, num_warps=4)


class SinksPlan(NamedTuple):
    """The gradient of sinks: the allocators of its partial sums, which kernels of the other
    gradients write, and of dsinks, and the launch that adds them.
    """

    partial: Allocator
    dsinks: Allocator
    launch: Launch

    def add(self, partial: torch.Tensor | None) -> torch.Tensor:
        """dsinks from the partial sums."""
        dsinks = self.dsinks()
        self.launch((partial, dsinks))
        return dsinks


def plan_sinks(problem: Problem, parts: int) -> SinksPlan | None:
    """The plan for so many partial sums of each head of a task; None without sinks."""
    if problem.sinks is None:
        return None
    dtype, _ = problem.sinks
    parts *= problem.batches
    launch = Launch(
        kernels.add_sinks_kernel,
        (problem.heads,),
        problem.device,
        (problem.heads, parts),
        dict(num_warps=ADD_SINKS.num_warps),
        BLOCK=ADD_SINKS.block,
    )
    return SinksPlan(
        allocator((parts, problem.heads), torch.float32, problem.device),
        allocator((problem.heads,), dtype, problem.device),
        launch,
    )


def without_keys(sinks: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """dsinks where no row has a key: lse is the sink itself, if there is one."""
    if dlse is None:
        return torch.zeros_like(sinks)
    return dlse.sum((0, 2)).to(sinks.dtype).masked_fill(sinks == float("-inf"), 0.0)
