"""A graph without a GPU is stood for by the work itself, whose count of steps the host forgets, as
it does of a graph's.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fusewright_models.training import captured
from fusewright_models.training.captured import CapturedStepper
from fusewright_models.training.optimizer_traits import counts, set_counts


class Stood(CapturedStepper):
    """Graphs that are the work that they would have captured."""

    fails = False

    def running(self):
        return nullcontext()

    def _capture(self, key, work, fail):
        def replay():
            before = counts(self.optimizer)
            work()
            set_counts(self.optimizer, before)

        if self.fails:
            fail(RuntimeError("it cannot be"))
        else:
            self.graphs[key] = SimpleNamespace(replay=replay)


def leave_out_streams(patch: pytest.MonkeyPatch) -> None:
    """Nothing of a `Stood` wants a GPU."""
    patch.setattr(torch.cuda, "Stream", lambda device: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def stand_for_captures(patch: pytest.MonkeyPatch) -> None:
    """Commands take their steps by a `Stood`."""
    leave_out_streams(patch)
    patch.setattr(captured, "obstacle", lambda *given: None)
    patch.setattr(captured, "CapturedStepper", Stood)
