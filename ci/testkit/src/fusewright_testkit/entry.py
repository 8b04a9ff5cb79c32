"""Loads the plugin in the processes that run tests. The one that hands them to others needs neither
it nor the tests' own fixtures, and importing torch takes as long as the tests of a small package.
"""

from __future__ import annotations

import os
from argparse import Namespace

import pytest


# Before the fixtures, which may import triton.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    options = early_config.known_args_namespace
    if hands_tests_out(options):
        options.noconftest = True
    else:
        early_config.pluginmanager.import_plugin(f"{__package__}.plugin")


def hands_tests_out(options: Namespace) -> bool:
    """Whether this is xdist's process of those options, and none of its workers."""
    several = getattr(options, "numprocesses", None)
    alone = options.collectonly or options.usepdb or "PYTEST_XDIST_WORKER" in os.environ
    return bool(several) and not alone
