"""The table of mutations is that of the code: each has its place, its part and its test; and one
that changes nothing survives.
"""

from __future__ import annotations

import subprocess

import mutations
import pytest
import workspace
from mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_mutation_has_its_one_place_and_its_test(mutation):
    assert (workspace.ROOT / mutation.path).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    part = workspace.find(mutation.part)
    assert (workspace.ROOT / mutation.path).is_relative_to(part.folder)
    sources = [path.read_text() for path in part.tests.rglob("test_*.py")]
    assert any(f"def {mutation.test}(" in source for source in sources)


@pytest.mark.parametrize(("code", "lives"), [(0, True), (1, False)])
def test_a_mutation_survives_where_its_test_passes(tmp_path, monkeypatch, code, lives):
    (tmp_path / "file.py").write_text("x = 1\n")
    seen = []

    def run(command, **options):
        seen.append((tmp_path / "file.py").read_text())
        return subprocess.CompletedProcess(command, code, "", "")

    monkeypatch.setattr(mutations.subprocess, "run", run)
    mutation = Mutation("name", "norm", "file.py", "x = 1", "x = 2", "test_x")
    assert mutations.survives(mutation, tmp_path) is lives
    assert seen == ["x = 2\n"]
    assert (tmp_path / "file.py").read_text() == "x = 1\n"


@pytest.mark.parametrize(("text", "code"), [("x = 1\nx = 1\n", 0), ("y = 1\n", 0), ("x = 1\n", 5)])
def test_a_mutation_without_its_place_or_its_test_is_an_error(tmp_path, monkeypatch, text, code):
    (tmp_path / "file.py").write_text(text)
    done = subprocess.CompletedProcess([], code, "", "")
    monkeypatch.setattr(mutations.subprocess, "run", lambda *args, **options: done)
    mutation = Mutation("name", "norm", "file.py", "x = 1", "x = 2", "test_x")
    with pytest.raises((ValueError, RuntimeError), match=r"must hold once|no test ran"):
        mutations.survives(mutation, tmp_path)
