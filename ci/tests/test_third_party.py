"""The shared layer is rebuilt when something that decides its content changes, and only then."""

from __future__ import annotations

import subprocess
import sys

import pytest
import third_party


@pytest.fixture
def calls(monkeypatch):
    """Makes environments without pip, and notes what would have been installed."""
    noted = []
    create = third_party.venv.create
    monkeypatch.setattr(third_party.venv, "create", lambda folder, with_pip: create(folder))
    monkeypatch.setattr(third_party.subprocess, "run", lambda command, check: noted.append(command))
    return noted


@pytest.fixture
def constraints(tmp_path):
    path = tmp_path / "tested.txt"
    path.write_text("rich==15.0.0\n")
    return path


def test_layer_takes_everything_that_testing_any_part_takes(repository):
    wanted = ["hatchling>=1.27,<1.32", "matplotlib>=3.9", "pytest>=8.4", "rich>=13", "torch>=2.11"]
    assert third_party.requirements(repository) == wanted


def test_same_requirements_build_once(tmp_path, constraints, calls):
    layer = tmp_path / "layer"
    first = third_party.ensure(layer, ["rich"], constraints)
    assert third_party.ensure(layer, ["rich"], constraints) == first
    assert len(calls) == 1
    assert str(constraints) in calls[0]


@pytest.mark.parametrize("what", ["requirements", "constraints", "interrupted"])
def test_a_change_builds_again(tmp_path, constraints, calls, what):
    layer = tmp_path / "layer"
    third_party.ensure(layer, ["rich"], constraints)
    (layer / "left-over").write_text("")
    if what == "constraints":
        constraints.write_text("rich==14.0.0\n")
    elif what == "interrupted":
        (layer / "fingerprint").unlink()
    third_party.ensure(
        layer, ["rich", "typer"] if what == "requirements" else ["rich"], constraints
    )
    assert len(calls) == 2
    assert not (layer / "left-over").exists()


def test_a_thin_environment_sees_the_layer_behind_itself(tmp_path, constraints, calls):
    seen = third_party.ensure(tmp_path / "layer", [], constraints)
    (seen / "shared.py").write_text("where = 'layer'\n")
    (seen / "covered.py").write_text("where = 'layer'\n")
    thin = tmp_path / "thin"
    third_party.venv.create(thin, with_pip=False)
    own = third_party.site_packages(thin)
    (own / "covered.py").write_text("where = 'thin'\n")
    (own / third_party.PTH).write_text(f"{seen}\n")
    code = "import shared, covered; print(shared.where, covered.where)"
    # Popen rather than run: the fixture stands in for the latter.
    command = [thin / ("Scripts" if sys.platform == "win32" else "bin") / "python", "-c", code]
    assert (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True).communicate()[0]
        == "layer thin\n"
    )
