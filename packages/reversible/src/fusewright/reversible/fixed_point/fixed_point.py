"""States of a reversible stack as whole numbers: sums of such are undone to the bit.

    s = round(2^F x)            next = s_before + round(2^F gain delta)         shown = 2^-F s

s is int32 of any shape, delta a layer's force in the dtype that states are shown in: fp32, or fp64
for fp64 states. A step and the step back are a launch each, which also writes what is shown of the
state; plain torch has the same states to the bit. Nothing is saved, and nothing is differentiated:
``MidpointStack`` passes gradients. The launch of a step writes to an argument, the flag, so it is a
function and no registered op; torch.compile traces torch's operations.

Midpoint rule on such states: docs/decisions/0011.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._core.backends import Backend, check_backend, uses_triton
from .._core.checks import checked_count
from . import launch, reference

Tensor = torch.Tensor

LIMIT = reference.LIMIT


class Stepped(NamedTuple):
    """The result of a step.

    Attributes:
        state: the next one.
        shown: as it is shown to a layer.
    """

    state: Tensor
    shown: Tensor


def check_step(name: str, state: Tensor, delta: Tensor) -> None:
    """A state and the force that changes it must be of one shape, in their dtypes."""
    if delta.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"delta must be float32 or float64, got {delta.dtype}")
    if state.dtype is not torch.int32:
        raise TypeError(f"{name} must be a state, int32, got {state.dtype}")
    if delta.shape != state.shape:
        raise ValueError(
            f"delta must have the state's shape {tuple(state.shape)}, got {tuple(delta.shape)}"
        )


class FixedPoint:
    """Numbers of 2^-F in int32, and the step of a midpoint stack on them: on a GPU one launch.

    Args:
        fraction_bits: F. The range is +-2^(30 - F).
        backend: "auto" takes the kernels for CUDA tensors and plain torch for CPU tensors;
            "triton" raises where the kernels cannot serve. All have the same states to the bit.

    Raises:
        TypeError: F is no integer.
        ValueError: no F from 1 to 29, or backend is none of the three.
    """

    def __init__(self, fraction_bits: int, *, backend: Backend = "auto") -> None:
        if not 1 <= checked_count("fraction_bits", fraction_bits) <= 29:
            raise ValueError(f"fraction_bits must be from 1 to 29, got {fraction_bits}")
        check_backend(backend)
        self.one: float = float(1 << fraction_bits)
        self.backend: Backend = backend

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The state of x, twice, and whether it is out of range, 0-d bool."""
        # States follow one another in memory as they stand: all are laid out like the first.
        state = reference.rounded(x.detach(), self.one).contiguous()
        return state, state, reference.outside(state)

    def step(self, before: Tensor, delta: Tensor, gain: float, saturated: Tensor) -> Stepped:
        """From the state ``before`` on by ``gain`` times ``delta``, in the dtype that states are
        shown in. Sets ``saturated``, 0-d bool, where that leaves the range.
        """
        check_step("before", before, delta)
        way = launch if self._kernels_serve(delta) else reference
        return Stepped(*way.advance(before, delta, gain, self.one, saturated))

    def step_back(self, after: Tensor, delta: Tensor, gain: float) -> Stepped:
        """The state whose step by ``gain`` times ``delta`` led to ``after``."""
        check_step("after", after, delta)
        way = launch if self._kernels_serve(delta) else reference
        return Stepped(*way.undo(after, delta, gain, self.one))

    def shown(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        """A state as it is shown to a layer."""
        return reference.floating(state, self.one, dtype)

    def _kernels_serve(self, delta: Tensor) -> bool:
        """Whether a launch of ours may take it."""
        return (
            # Not a tensor that only stands for another.
            type(delta) is Tensor
            and not torch.compiler.is_compiling()
            and uses_triton(delta, self.backend)
        )
