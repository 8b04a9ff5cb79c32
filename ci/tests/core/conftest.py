"""The core is tested as a part of a package that `nox -s new` lays out, installed from its
wheel.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def run_python():
    """Run code in a Python of its own; returns what it prints."""

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
