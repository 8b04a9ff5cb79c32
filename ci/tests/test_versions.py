"""Each package has its own version: one moves, all others still install by their ranges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import workspace

PACKAGES = [package.name for package in workspace.packages()]
MODELS = bool(workspace.integration())


def bumped(version: str, place: int) -> str:
    """1.2.3 with the number at ``place`` raised by one and the later ones set to 0."""
    numbers = [int(n) for n in version.split(".")]
    return ".".join(map(str, [*numbers[:place], numbers[place] + 1, *[0] * (2 - place)]))


def write_stand_in(folder: Path, requirement: str) -> None:
    """A wheel of another project's distribution: only metadata, at the lowest version."""
    name = workspace.requirement_name(requirement)
    version = re.search(r">=\s*([\d.]+)", requirement)[1]
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        info = f"{stem}.dist-info"
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", header)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def copied(tmp_path, build_wheels):
    """A copy of the repository's parts; the call bumps one, builds all, and asks pip's resolver."""
    root = tmp_path / "copy"
    for part in [*workspace.packages(), *workspace.integration()]:
        target = root / part.folder.relative_to(workspace.ROOT)
        shutil.copytree(part.source, target / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(part.folder / name, target)

    def install_with_bumped(name: str, place: int) -> subprocess.CompletedProcess:
        moved = workspace.find(name, root)
        file = moved.folder / "pyproject.toml"
        line = f'version = "{moved.version}"'
        file.write_text(
            file.read_text().replace(line, f'version = "{bumped(moved.version, place)}"', 1)
        )
        parts = [*workspace.packages(root), *workspace.integration(root)]
        dist, others = build_wheels(*parts), tmp_path / "others"
        others.mkdir()
        for requirement in workspace.third_party(parts):
            write_stand_in(others, requirement)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--isolated",
        ]
        command += ["--no-index", "--find-links", str(others), *map(str, dist.glob("*.whl"))]
        # No configuration of the machine: the resolver sees these files and nothing else.
        environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return install_with_bumped


@pytest.mark.parametrize("name", PACKAGES)
def test_one_package_moves_alone(copied, name):
    told = copied(name, 2)
    assert told.returncode == 0, told.stderr
    moved = bumped(workspace.find(name).version, 2)
    assert f"fusewright-{name}-{moved}" in told.stdout


@pytest.mark.skipif(not MODELS, reason="the repository has no models yet")
def test_models_refuse_a_package_that_may_have_broken_them(copied):
    (models,) = workspace.integration()
    name = models.siblings[0].removeprefix("fusewright-")
    place = 1 if workspace.find(name).version.startswith("0.") else 0
    told = copied(name, place)
    assert told.returncode != 0
    assert "conflict" in told.stderr.lower()
