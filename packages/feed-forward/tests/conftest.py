"""What the tests of this package share."""

from __future__ import annotations

import pytest
import torch

from .operations import GATINGS, GatingOp

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(params=GATINGS)
def op(request: pytest.FixtureRequest) -> GatingOp:
    """Each gating; a module that is about one says so by its parametrization."""
    return GATINGS[request.param]


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def many_programs(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs so small that few elements take several, which begin amid rows."""
    from fusewright.feed_forward.gating import launch

    for table in ("FORWARD", "BACKWARD"):
        config = getattr(launch, table)._replace(block=64, num_warps=1)
        monkeypatch.setattr(launch, table, config)
