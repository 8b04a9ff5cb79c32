"""What the tests of kernels compile for GPUs that are not there."""

from __future__ import annotations

import torch
from fusewright_models._fixed_point_kernels import advance, undo


def steps_of_states() -> None:
    """One on and one back, with and without halving."""
    delta = torch.empty(4096)
    state = torch.zeros(4096, dtype=torch.int32)
    saturated = torch.zeros((), dtype=torch.bool)
    for earlier in (None, state):
        _, _, dropped = advance(state, earlier, delta, 0.5, 2.0**20, saturated)
        undo(state, earlier, delta, 0.5, 2.0**20, dropped)
