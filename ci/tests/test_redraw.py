"""One command for the packages, one for the models, of those that were asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import redraw
import workspace


@pytest.mark.parametrize(
    ("names", "packages", "models"),
    [([], ["memory-mlp", "norm"], 1), (["norm"], ["norm"], 0), (["integration"], [], 1)],
    ids=["all", "package", "models"],
)
def test_commands_draw_what_was_asked_for(names, packages, models, repository, monkeypatch):
    parts = workspace.packages(repository), workspace.integration(repository)
    monkeypatch.setattr(workspace, "packages", lambda: parts[0])
    monkeypatch.setattr(workspace, "integration", lambda: parts[1])
    commands = redraw.commands(names)
    folders = [str(repository / "packages" / name) for name in packages]
    wanted = [[sys.executable, "-m", "fusewright_testkit.report", *folders]] if packages else []
    wanted += [[sys.executable, str(repository / "integration/report.py")]] * models
    assert commands == wanted


@pytest.mark.parametrize("codes", [(0, 0), (0, 1), (-9, 0), (0, -9)])
def test_command_that_does_not_come_to_its_end_is_told(codes, monkeypatch):
    ended = iter(codes)
    monkeypatch.setattr(redraw, "commands", lambda names: [["one"], ["other"]])
    run = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=next(ended)))
    monkeypatch.setattr(redraw, "subprocess", run)
    monkeypatch.setattr(sys, "argv", ["redraw.py"])
    assert bool(redraw.main()) == any(codes)
