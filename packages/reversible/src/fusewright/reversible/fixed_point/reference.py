"""States of 2^-F in int32 in plain torch: the specification, and what a CPU runs.

``one`` is 2^F, ``delta`` the force of a layer in the dtype that states are shown in.
"""

from __future__ import annotations

import torch

from .._core.precision import wide

Tensor = torch.Tensor

# Sums of two numbers below it stay within int32.
LIMIT = 1 << 30


def rounded(x: Tensor, one: float) -> Tensor:
    """x in whole numbers; what does not fit, NaN too, is `outside`."""
    scaled = (wide(x) * one).round_()
    scaled = torch.nan_to_num(scaled, nan=LIMIT, posinf=LIMIT, neginf=-LIMIT)
    return scaled.clamp_(-LIMIT, LIMIT).to(torch.int32)


def floating(state: Tensor, one: float, dtype: torch.dtype) -> Tensor:
    """A state as it is shown to a layer."""
    return state.to(dtype) * (1.0 / one)


def outside(state: Tensor) -> Tensor:
    """Whether any number is at or beyond the ends of the range, 0-d bool."""
    return (state.abs() >= LIMIT).any()


def moved(before: Tensor, kick: Tensor) -> Tensor:
    """before + kick, at the ends of the range at most."""
    return (before + kick).clamp_(-LIMIT, LIMIT)


def advance(
    before: Tensor, delta: Tensor, gain: float, one: float, saturated: Tensor
) -> tuple[Tensor, Tensor]:
    """The next state, and as it is shown; sets ``saturated`` where that leaves the range."""
    kick = rounded(gain * delta, one)
    new = moved(before, kick)
    saturated |= outside(kick) | outside(new)
    return new, floating(new, one, delta.dtype)


def undo(after: Tensor, delta: Tensor, gain: float, one: float) -> tuple[Tensor, Tensor]:
    """The state whose step led to ``after``, and as it is shown."""
    before = after - rounded(gain * delta, one)
    return before, floating(before, one, delta.dtype)
