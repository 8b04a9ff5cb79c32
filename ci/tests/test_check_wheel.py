"""A wheel that keeps the contract passes, and each way of breaking it is told."""

from __future__ import annotations

import zipfile

import check_wheel
import pytest
import workspace


@pytest.fixture
def norm(repository):
    return workspace.find("norm", repository)


def test_built_wheels_keep_the_contract(repository, build_wheels):
    projects = [*workspace.packages(repository), *workspace.integration(repository)]
    dist = build_wheels(*projects)
    assert [check_wheel.problems(project, dist) for project in projects] == [[], [], []]


def test_a_missing_wheel_is_told(norm, tmp_path):
    wanted = "fusewright_norm-0.1.0-py3-none-any.whl"
    assert check_wheel.problems(norm, tmp_path) == [f"wanted {wanted}, got no wheel"]


def test_a_wheel_of_another_version_is_told(norm, build_wheels):
    dist = build_wheels(norm)
    text = (norm.folder / "pyproject.toml").read_text().replace("0.1.0", "0.2.0")
    (norm.folder / "pyproject.toml").write_text(text)
    (told,) = check_wheel.problems(workspace.load(norm.folder), dist)
    assert "wanted fusewright_norm-0.2.0" in told


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("src/fusewright/__init__.py", "holds fusewright/__init__.py, outside fusewright/norm/"),
        ("src/fusewright/gsa/a.py", "holds fusewright/gsa/a.py, outside fusewright/norm/"),
        ("src/fusewright/norm/tests/a.py", "holds the test fusewright/norm/tests/a.py"),
        ("src/fusewright/norm/test_a.py", "holds the test fusewright/norm/test_a.py"),
    ],
)
def test_a_file_too_many_is_told(norm, build_wheels, path, problem):
    file = norm.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    (told,) = check_wheel.problems(norm, build_wheels(norm))
    assert told.endswith(problem)


@pytest.mark.parametrize("path", ["src/fusewright/norm/py.typed", "LICENSE"])
def test_a_missing_file_is_told(norm, build_wheels, path):
    (norm.folder / path).unlink()
    (told,) = check_wheel.problems(norm, build_wheels(norm))
    assert "lacks" in told
    assert path.rpartition("/")[2] in told


def test_a_requirement_on_a_sibling_is_told(norm, build_wheels):
    text = (norm.folder / "pyproject.toml").read_text()
    text = text.replace('"torch>=2.11"', '"torch>=2.11", "fusewright-memory-mlp>=0.1,<0.2"')
    (norm.folder / "pyproject.toml").write_text(text)
    (told,) = check_wheel.problems(norm, build_wheels(norm))
    assert "requires its sibling fusewright-memory-mlp" in told


def test_models_without_ranges_or_privacy_are_told(repository, build_wheels):
    (models,) = workspace.integration(repository)
    text = (models.folder / "pyproject.toml").read_text()
    text = text.replace("fusewright-norm>=0.1,<0.2", "fusewright-norm").replace("Do Not", "Do")
    (models.folder / "pyproject.toml").write_text(text.replace("Private", "Topic"))
    told = check_wheel.metadata_problems(
        models,
        "Metadata-Version: 2.4\nName: fusewright-models\nVersion: 0.1.0\n"
        "Requires-Dist: fusewright-norm\nRequires-Dist: torch\n",
    )
    assert told == [
        "requires fusewright-norm without a range",
        "lacks the classifier Private :: Do Not Upload",
    ]


def test_metadata_that_the_publish_action_refuses_is_told(norm):
    text = "Metadata-Version: 2.5\nName: fusewright-norm\nVersion: 0.1.0\n"
    assert check_wheel.metadata_problems(norm, text) == ["has metadata 2.5, wanted at most 2.4"]


def test_backend_writes_accepted_metadata(norm, build_wheels):
    (wheel,) = build_wheels(norm).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("fusewright_norm-0.1.0.dist-info/METADATA").decode()
    assert "Metadata-Version: 2.4" in text
