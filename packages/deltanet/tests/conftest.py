"""What the tests of this package share."""

from __future__ import annotations

import pytest
import torch

from .operations import RULE, STEP, RuleOp, StepOp

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture
def rule_op() -> RuleOp:
    return RULE


@pytest.fixture
def step_op() -> StepOp:
    return STEP


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
