"""What the README promises, the runner, the workflows and the parts' metadata agree."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest
import workspace

ROOT = workspace.ROOT
SET_UP = "python3 -m venv .venv && .venv/bin/python -m pip install nox && .venv/bin/python -m nox"
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def nox_sessions() -> dict[str, str]:
    """Name and docstring of every session, read from the noxfile without nox."""
    found = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        marks = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
        if any(mark.startswith("nox.session") for mark in marks):
            found[node.name] = ast.get_docstring(node) or ""
    return found


def test_sessions_are_these_and_say_in_one_line_what_they_do():
    wanted = "tests cpus lint typing demo bench gpu wheels minimums release_check new docs full"
    wanted += " mutations torchtitan transformers wheelhouse build newest hub"
    assert set(nox_sessions()) == set(wanted.split())
    assert [name for name, text in nox_sessions().items() if not text or "\n" in text] == []


def test_sessions_over_shared_parameters_call_them_alike():
    text = (ROOT / "noxfile.py").read_text()
    names = set(re.findall(r"nox\.parametrize\(\"(\w+)\"", text))
    for node in ast.parse(text).body:
        if any(ast.unparse(d).startswith("each_") for d in getattr(node, "decorator_list", ())):
            names.add(node.args.args[1].arg)
    assert names == {"part"}


def test_ci_runs_the_readmes_test_command_to_the_letter():
    commands = [f"{SET_UP} -s demo", f"{SET_UP} -s tests"]
    readme = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in readme if line in commands] == commands
    assert f"\n{commands[1]} ||" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_steps_are_single_lines_that_call_nox_or_a_script(path):
    # Not echo "name=$(…)", which succeeds where the script fails.
    known = (
        r"\S*python3? -m (pip install nox|nox -s .+|venv .+)|"
        r'(\w+)=\$\(python ci/.+\) && echo "\2=\$\2" >> "\$GITHUB_OUTPUT"'
    )
    steps = re.findall(r"^\s*(?:- )?run: (.*)$", path.read_text(), re.M)
    assert steps
    assert [step for step in steps if not re.fullmatch(known, step)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_names_sessions_that_exist(path):
    names = re.findall(r"nox -s \"?([a-z_]+)", path.read_text())
    assert set(names) <= set(nox_sessions())


@pytest.mark.parametrize(
    "part", [*workspace.packages(), *workspace.integration(), workspace.kit()], ids=lambda p: p.name
)
def test_part_is_built_by_a_backend_whose_metadata_can_be_published(part):
    assert part.build_requirements == ("hatchling>=1.27,<1.32",)


def test_every_requirement_of_the_repository_is_in_the_known_good_set():
    text = (ROOT / "ci/constraints/tested.txt").read_text()
    pinned = {line.partition("==")[0] for line in text.splitlines() if "==" in line}
    parts = [*workspace.packages(), *workspace.integration(), workspace.kit()]
    groups = {name for part in parts for name in part.groups} - {"bench"}
    wanted = set(map(workspace.requirement_name, workspace.third_party(parts, *groups)))
    assert wanted - pinned == set()
    assert {"torch==2.13.0", 'triton==3.7.1; sys_platform == "linux"'} <= set(text.splitlines())


def test_citation_has_what_its_format_asks_for_and_the_packages_licence():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    told = dict(line.split(": ", 1) for line in lines if re.match(r"[\w-]+: ", line))
    assert {"cff-version", "message", "title", "license"} <= told.keys()
    assert "authors:" in lines
    licences = {
        tomllib.loads((p.folder / "pyproject.toml").read_text())["project"]["license"]
        for p in workspace.packages()
    }
    assert licences == {told["license"]}
