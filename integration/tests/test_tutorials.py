"""The tutorials run from their first block to their last, and print what they show.

EXPECTTEST_ACCEPT=1 in the environment writes what they print into them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fusewright_models.cli import app
from fusewright_testkit.pages import ran
from torch.distributed import TCPStore

from .commands import invoke, leave_out_pictures

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))

# Wheels are tested without the sources beside them.
pytestmark = pytest.mark.skipif(not TUTORIALS, reason="docs/ is not beside these tests")


# After which processes that wait for one another are given up.
SECONDS = 240
# What one process of torchrun runs.
PROCESS = """
import os, runpy, sys
os.chdir({folder!r})
os.environ |= {told}
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


def install(arguments: list[str]) -> None:
    """What is there is installed already."""
    command, *folders = arguments
    assert command == "install"
    assert all([*ROOT.glob(folder)] for folder in folders)


def train(arguments: list[str]) -> None:
    # A program of its own would know nothing of the page's default.
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    result = invoke(app, *arguments)
    torch.set_default_dtype(dtype)
    assert result.exit_code == 0, result.output


def new_package(arguments: list[str]) -> None:
    """``nox -s new -- NAME``, in the current folder."""
    session, name = arguments[:3], arguments[3]
    assert session == ["-s", "new", "--"]
    import new_package

    new_package.lay_out(name, Path.cwd())


def remove(arguments: list[str]) -> None:
    for name in arguments:
        Path(name).unlink()


def quick_tests(arguments: list[str]) -> None:
    """``python ci/quick.py NAME``, of a package in the current folder."""
    script, name, *more = arguments
    package = str(Path("packages", name).resolve())
    command = [sys.executable, str(ROOT / script), package, *more]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout


def torchrun(arguments: list[str]) -> None:
    """As many processes as are asked for, each told what torchrun tells it."""
    flag, count, script = arguments
    assert flag == "--nproc-per-node"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    programs = [
        PROCESS.format(folder=str(Path.cwd()), told=told | {"RANK": str(rank)}, script=script)
        for rank in range(int(count))
    ]
    options: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([sys.executable, "-c", each], **options) for each in programs]

    def said(process: subprocess.Popen[str]) -> tuple[str, str]:
        out, errors = process.communicate(timeout=SECONDS)
        if process.returncode:
            # The others would wait for it.
            for other in processes:
                other.kill()
        return out, errors

    with ThreadPoolExecutor(len(processes)) as pool:
        texts = list(pool.map(said, processes))
    assert not any(each.returncode for each in processes), texts
    print("".join(out for out, _ in texts), end="")


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "fusewright-train": train,
    "nox": new_package,
    "pip": install,
    "python": quick_tests,
    "rm": remove,
    "torchrun": torchrun,
}


@pytest.fixture
def restored(tmp_path, monkeypatch, short_samples):
    """An empty folder to run in; what a page sets for its own process is set back."""
    leave_out_pictures(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "ci")
    monkeypatch.syspath_prepend(tmp_path)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    sys.modules.pop("step", None)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_prints_what_it_shows(page, restored):
    text = page.read_text()
    if "TRITON_INTERPRET" in text and torch.cuda.is_available():
        pytest.skip("where there is a GPU, kernels run on that")
    found = ran(text, PROGRAMS, page.name)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        page.write_text(found)
    else:
        assert found == text
