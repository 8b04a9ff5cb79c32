"""Scripts of several processes, which leave what they found in a folder."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from fusewright_testkit.plugin import alone

SECONDS = 120

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


def script(name: str) -> ModuleType:
    """One beside this file, as a module: tests are no package."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_once(
    module: ModuleType, tmp_path_factory: pytest.TempPathFactory, *arguments: str
) -> pathlib.Path:
    """The folder of a script that has run with these arguments, once in a run of the tests."""
    root = tmp_path_factory.getbasetemp()
    name = "-".join([module.__name__, *arguments])
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with alone(folder.with_suffix(".lock")):
        if not folder.exists():
            folder.mkdir()
            command = [sys.executable, module.__file__, str(folder), *arguments]
            # Who waits for the others in vain gives up after a minute.
            subprocess.run(command, timeout=SECONDS, check=True)
    return folder


@functools.cache
def found_by_all(module: ModuleType, folder: pathlib.Path) -> list[dict]:
    """By process; a second to read, for every test that asks."""
    paths = [folder / f"found-{rank}.pt" for rank in range(module.PROCESSES)]
    return [torch.load(path, weights_only=True) for path in paths]
