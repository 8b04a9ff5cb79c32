"""The scripts are imported by their file names, and tried on a small repository made here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CI))

import workspace  # noqa: E402

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27,<1.32"]
build-backend = "hatchling.build"
[project]
name = "{distribution}"
version = "0.1.0"
description = "about {distribution}"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = [{dependencies}]
classifiers = [{classifiers}]
[dependency-groups]
test = ["pytest>=8.4", {{ include-group = "draw" }}]
draw = ["matplotlib>=3.9"]
[tool.hatch.build.targets.wheel]
packages = ["src/{top}"]
"""


def quoted(*words: str) -> str:
    return ", ".join(f'"{word}"' for word in words)


def write_part(
    folder: Path, distribution: str, code: str, *dependencies: str, private: bool
) -> None:
    """Writes one part of a repository: metadata, an empty module, a licence."""
    source = folder / "src" / code
    source.mkdir(parents=True)
    (folder / "tests").mkdir()
    for name in ("__init__.py", "py.typed"):
        (source / name).write_text("")
    (folder / "LICENSE").write_text("as you like\n")
    (folder / "pyproject.toml").write_text(
        PYPROJECT.format(
            distribution=distribution,
            top=code.partition("/")[0],
            dependencies=quoted(*dependencies),
            classifiers=quoted("Private :: Do Not Upload") if private else "",
        )
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two packages, the models and the testkit."""
    root = tmp_path / "repository"
    root.mkdir()
    address = '[tool.fusewright]\nrepository = "https://example.org/ours"\n'
    (root / "pyproject.toml").write_text(address)
    for name in ("norm", "memory-mlp"):
        code = f"fusewright/{name.replace('-', '_')}"
        write_part(
            root / "packages" / name, f"fusewright-{name}", code, "torch>=2.11", private=False
        )
    ranges = ("torch>=2.11", "fusewright-norm>=0.1,<0.2", "fusewright-memory-mlp>=0.1,<0.2")
    write_part(
        root / "integration", "fusewright-models", "fusewright_models", *ranges, private=True
    )
    write_part(
        root / "ci/testkit", "fusewright-testkit", "fusewright_testkit", "rich>=13", private=True
    )
    return root


@pytest.fixture(scope="session")
def build_wheel() -> Callable[[Path, Path], None]:
    """Builds the wheel of a project's folder into another, with this environment's backend."""

    def build(folder: Path, out: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    return build


@pytest.fixture
def build_wheels(tmp_path: Path, build_wheel: Callable[[Path, Path], None]) -> Callable[..., Path]:
    """Builds wheels of projects into one folder."""

    def build(*projects: workspace.Project) -> Path:
        out = tmp_path / "dist"
        for project in projects:
            build_wheel(project.folder, out)
        return out

    return build
