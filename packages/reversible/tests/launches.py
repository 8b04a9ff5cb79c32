"""Calls that launch the kernels, for the compile tests: tensors are never read."""

from __future__ import annotations

import torch
from fusewright.reversible.fixed_point import launch


def steps_of_states() -> None:
    """One on and one back."""
    delta = torch.empty(4096)
    state = torch.zeros(4096, dtype=torch.int32)
    saturated = torch.zeros((), dtype=torch.bool)
    launch.advance(state, delta, 0.5, 2.0**20, saturated)
    launch.undo(state, delta, 0.5, 2.0**20)
