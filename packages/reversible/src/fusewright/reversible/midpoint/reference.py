"""The midpoint rule in real numbers: the specification, and what the stack is timed against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor


def midpoint_rule(x: Tensor, forces: Sequence[Callable[[Tensor], Tensor]], step: float) -> Tensor:
    """p_L of p_0 = x; f_l is given as ``forces[l]``."""
    before = after = x
    for number, force in enumerate(forces):
        gain = 2.0 * step if number else 0.5 * step
        before, after = after, before + gain * force(after)
    return after
