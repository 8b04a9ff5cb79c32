"""Which process of a run loads the testkit's plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace

import pytest
from fusewright_testkit.entry import hands_tests_out

# Its fixtures: who imported them. A module of pytest's: who imported torch.
CONFTEST = """
import os, pathlib
pathlib.Path("fixtures", str(os.getpid())).touch()
"""
SPY = """
import os, pathlib, sys
def pytest_unconfigure():
    if "torch" in sys.modules:
        pathlib.Path("torch", str(os.getpid())).touch()
"""
TEST = """
import os
def test_plugin_is_here(device):
    assert device == "cuda" or os.environ["TRITON_INTERPRET"] == "1"
"""


def test_process_that_hands_tests_out_imports_neither_torch_nor_fixtures(tmp_path):
    for name in ("fixtures", "torch"):
        (tmp_path / name).mkdir()
    for name, text in (("conftest", CONFTEST), ("spy", SPY), ("test_one", TEST)):
        (tmp_path / f"{name}.py").write_text(text)
    left_out = "PYTEST_XDIST_WORKER", "TRITON_INTERPRET"
    environment = {name: x for name, x in os.environ.items() if name not in left_out}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    plugins = ["-p", "xdist", "-p", "fusewright_testkit.entry", "-p", "spy"]
    command = [sys.executable, "-m", "pytest", ".", *plugins, "-n", "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    for name in ("fixtures", "torch"):
        (found,) = (int(path.name) for path in (tmp_path / name).iterdir())
        assert found != process.pid


@pytest.mark.parametrize(
    ("options", "worker", "expected"),
    [
        (dict(numprocesses=2), False, True),
        (dict(numprocesses="auto"), False, True),
        (dict(numprocesses=2), True, False),
        (dict(numprocesses=0), False, False),
        (dict(numprocesses=None), False, False),
        ({}, False, False),
        # It collects by itself, or runs all in itself.
        (dict(numprocesses=2, collectonly=True), False, False),
        (dict(numprocesses="auto", usepdb=True), False, False),
    ],
    ids=str,
)
def test_process_of_these_options_hands_tests_out(monkeypatch, options, worker, expected):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    given = Namespace(**dict(collectonly=False, usepdb=False) | options)
    assert hands_tests_out(given) == expected
