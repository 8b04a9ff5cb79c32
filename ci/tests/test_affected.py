"""A change wakes what it can break, and an unknown file wakes everything."""

from __future__ import annotations

import affected
import pytest

PACKAGES = ["memory-mlp", "norm"]
EVERYTHING = {"memory-mlp", "norm", "integration", "new", "core"}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("packages/norm/src/fusewright/norm/rms_norm.py", {"norm", "integration"}),
        ("packages/_core/registration.py", EVERYTHING),
        ("ci/tests/core/test_internals.py", {"core"}),
        ("ci/template/src/fusewright/example/__init__.py", {"new", "core", "integration"}),
        ("packages/memory-mlp/src/fusewright/memory_mlp/a.py", {"memory-mlp", "integration"}),
        ("packages/norm/hub/layers.py", {"norm", "integration"}),
        ("packages/memory-mlp/pyproject.toml", {"memory-mlp", "integration"}),
        ("packages/norm/tests/test_rms_norm.py", {"norm"}),
        ("packages/norm/README.md", {"integration"}),
        ("packages/norm/CHANGELOG.md", set()),
        ("integration/README.md", {"integration"}),
        ("docs/tutorials/own-model.md", {"integration"}),
        ("docs/models/titan-mac.md", {"integration"}),
        ("docs/migration.md", {"integration"}),
        ("docs/decisions/0001-registration.md", set()),
        ("packages/norm/results/h200-torch2.11-triton3.6.csv", set()),
        ("packages/normal/src/a.py", EVERYTHING),
        ("packages/norm", EVERYTHING),
        ("integration/src/fusewright_models/cli.py", {"integration"}),
        ("integration/tests/test_cli.py", {"integration"}),
        ("ci/workspace.py", EVERYTHING),
        ("ci/testkit/src/fusewright_testkit/plugin.py", EVERYTHING),
        ("ci/constraints/tested.txt", EVERYTHING),
        ("noxfile.py", EVERYTHING),
        ("pyproject.toml", EVERYTHING),
        (".ci/run", EVERYTHING),
        (".github/workflows/checks.yml", EVERYTHING),
        ("docs/hooks.py", set()),
        ("README.md", set()),
        ("something-new", EVERYTHING),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_file_wakes_what_it_can_break(path, parts):
    assert affected.parts_for(path, PACKAGES) == parts


def test_sessions_come_in_the_order_of_the_workspace():
    paths = ["packages/norm/src/a.py", "packages/norm/README.md"]
    told = affected.sessions(paths, PACKAGES, ["tests", "typing"])
    assert told == [
        "tests(norm)",
        "tests(integration)",
        "typing(norm)",
        "typing(integration)",
        "transformers",
    ]
    told = affected.sessions(
        ["ci/template/README.md", "ci/template/a.py"], PACKAGES, ["tests", "typing"]
    )
    found = ["tests(integration)", "tests(new)", "tests(core)"]
    assert told == [*found, "typing(integration)", "typing(new)", "transformers"]
    assert affected.sessions(paths, PACKAGES, ["gpu"]) == ["gpu(norm)", "gpu(integration)"]


def test_transformers_goes_with_the_tests_of_the_models():
    path = ["integration/tests/test_patch.py"]
    assert "transformers" in affected.sessions(path, PACKAGES, ["tests"])
    assert "transformers" not in affected.sessions(path, PACKAGES, ["typing"])
    assert "transformers" not in affected.sessions(
        ["packages/norm/tests/a.py"], PACKAGES, ["tests"]
    )


def test_no_change_wakes_nothing():
    assert affected.sessions([], PACKAGES, ["tests"]) == []
