"""What holds of the package and of all its operations."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit.conformance.suite import *  # noqa: F403

from .operations import FORMS, OPERATIONS, PACKAGE  # noqa: F401


@pytest.fixture(autouse=True)
def short_runs(request: pytest.FixtureRequest) -> None:
    """The interpreter takes the tokens of a run one after the other."""
    if not torch.cuda.is_available():
        request.getfixturevalue("many_input_programs")
