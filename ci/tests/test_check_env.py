"""An environment passes only with exactly the wheels that were built here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv

import check_env
import pytest
import workspace


@pytest.fixture
def environment(tmp_path):
    """A thin environment, and a call that installs wheels into it."""
    folder = tmp_path / "environment"
    venv.create(folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def install(*files, options=()):
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
        subprocess.run(
            [*command, "--no-index", *options, *map(str, files)], check=True, capture_output=True
        )

    def problems(*projects, served=False):
        call = f"check_env.problems({names(projects)!r}, {served})"
        code = f"import check_env; print(*{call}, sep='\\n')"
        path = {"PYTHONPATH": str(workspace.ROOT / "ci")}
        told = subprocess.run(
            [python, "-c", code], env=os.environ | path, check=True, capture_output=True, text=True
        )
        return told.stdout.split("\n")[:-1] if told.stdout.strip() else []

    return install, problems


def names(projects) -> dict[str, str]:
    return {project.distribution: project.import_name for project in projects}


def test_exactly_the_built_wheels_pass(repository, build_wheels, environment):
    install, problems = environment
    norm, kit = workspace.find("norm", repository), workspace.kit(repository)
    install(*build_wheels(norm, kit).glob("*.whl"))
    assert problems(norm, kit) == []
    assert problems(norm) == ["fusewright-testkit is installed and should not be"]
    memory = workspace.find("memory-mlp", repository)
    assert problems(norm, memory, kit) == ["fusewright-memory-mlp is not installed"]


def test_an_editable_install_is_told(repository, build_wheels, environment, tmp_path):
    install, problems = environment
    norm = workspace.find("norm", repository)
    install(*build_wheels(norm).glob("*.whl"))
    (record,) = (tmp_path / "environment").rglob("direct_url.json")
    url = norm.folder.as_uri()
    record.write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    assert problems(norm) == [f"fusewright-norm came from {url}, wanted a local wheel file"]


def test_a_wheel_from_an_index_is_told(repository, build_wheels, environment):
    install, problems = environment
    norm = workspace.find("norm", repository)
    dist = build_wheels(norm)
    install("fusewright-norm", options=["--find-links", str(dist)])
    assert problems(norm) == ["fusewright-norm came from an index, wanted a local wheel file"]


def test_wheels_installed_by_name_pass_where_no_origin_is_wanted(
    repository, build_wheels, environment
):
    install, problems = environment
    norm, memory = (workspace.find(name, repository) for name in ("norm", "memory-mlp"))
    install("fusewright-norm", options=["--find-links", str(build_wheels(norm, memory))])
    assert problems(norm, served=True) == []
    assert problems(memory, served=True) == [
        "fusewright-norm is installed and should not be",
        "fusewright-memory-mlp is not installed",
    ]


def test_the_source_tree_in_front_is_told(repository, build_wheels, environment, monkeypatch):
    install, _ = environment
    norm = workspace.find("norm", repository)
    (wheel,) = build_wheels(norm).glob("*.whl")
    install(wheel)
    monkeypatch.syspath_prepend(str(norm.source))
    told = check_env.location_problem("fusewright.norm", Installed())
    assert "is imported from" in told
    assert str(norm.import_folder) in told


class Installed:
    """Stands for a distribution whose files lie where no import looks."""

    def locate_file(self, name):
        return f"/nowhere/{name}"


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("kernels", "triton"),
        ("adapter", "of_an_extra"),
        ("launch", "triton"),
        ("kernels", "numpy_of_another_name"),
        ("__init__", "of_an_extra"),
    ],
)
def test_kernels_alone_may_miss_triton_and_modules_an_extra(tmp_path, monkeypatch, module, missing):
    package = tmp_path / f"with_{missing}_in_{module}"
    package.mkdir()
    empty = dict.fromkeys(("__init__", "kernels", "adapter", "launch"), "")
    texts = empty | {module: f"import {missing}"}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    # Missing, wherever this runs.
    monkeypatch.setitem(sys.modules, missing, None)
    if (module, missing) not in {("kernels", "triton"), ("adapter", "of_an_extra")}:
        with pytest.raises(ModuleNotFoundError, match=missing):
            check_env.import_public_modules(package.name, {"of_an_extra"})
        return
    imported, wanting = check_env.import_public_modules(package.name, {"of_an_extra"})
    there = sorted({"kernels", "adapter", "launch"} - {module})
    assert imported == [package.name, *(f"{package.name}.{name}" for name in there)]
    assert wanting == [f"{package.name}.{module}"]
