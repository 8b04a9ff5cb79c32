"""What holds of the package and of all its operations."""

from __future__ import annotations

import pytest
from fusewright_testkit.conformance.suite import *  # noqa: F403

from .operations import FORMS, OPERATIONS, PACKAGE  # noqa: F401


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, device: str) -> None:
    """On a CPU, tiles so small that tiny tensors are several of them."""
    if device == "cpu":
        request.getfixturevalue("small_programs")
        request.getfixturevalue("one_tiling")
