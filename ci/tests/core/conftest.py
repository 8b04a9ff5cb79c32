"""The core is tested as a part of a package that `nox -s new` lays out, installed from its
wheel.
"""

from __future__ import annotations

import fusewright_testkit.fresh
import pytest


@pytest.fixture
def run_python():
    """Run code in a Python of its own; returns what it prints."""
    return fusewright_testkit.fresh.run_python
