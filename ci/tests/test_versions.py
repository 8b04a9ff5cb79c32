"""Each package has its own version: one moves, all others still install by their ranges."""

from __future__ import annotations

import importlib.metadata
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


def copy_of(part: workspace.Project, root: Path) -> workspace.Project:
    """What a part's wheel is built from, under another root."""
    target = root / part.folder.relative_to(workspace.ROOT)
    shutil.copytree(part.source, target / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(part.folder / name, target)
    return workspace.find(part.name, root)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, build_wheel):
    """The wheels of all parts, and of what they require of others, by distribution."""
    parts = [*workspace.packages(), *workspace.integration()]
    built, others = (tmp_path_factory.mktemp(name) for name in ("built", "others"))
    for requirement in workspace.third_party(parts):
        write_stand_in(others, requirement)
    found = {}
    for part in parts:
        build_wheel(part.folder, built / part.name)
        (found[part.name],) = (built / part.name).glob("*.whl")
    return found, others


@pytest.fixture
def install_with_bumped(tmp_path, wheels, build_wheel):
    """Bumps one part, builds its wheel, and asks pip's resolver for it beside all others'."""

    def install(name: str, place: int) -> subprocess.CompletedProcess:
        moved = copy_of(workspace.find(name), tmp_path / "copy")
        file = moved.folder / "pyproject.toml"
        line = f'version = "{moved.version}"'
        file.write_text(
            file.read_text().replace(line, f'version = "{bumped(moved.version, place)}"', 1)
        )
        build_wheel(moved.folder, tmp_path / "dist")
        built, others = wheels
        (wheel,) = (tmp_path / "dist").glob("*.whl")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--isolated", "--no-index", "--find-links", str(others)]
        command += map(str, {**built, name: wheel}.values())
        # No configuration of the machine: the resolver sees these files and nothing else.
        environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return install


@pytest.mark.parametrize("name", [*PACKAGES, *(part.name for part in workspace.integration())])
def test_part_is_installed_by_name_from_folders_of_wheels(wheels, tmp_path, name):
    part, (built, others) = workspace.find(name), wheels
    folders = [others, *(wheel.parent for wheel in built.values())]
    command = [sys.executable, "-m", "pip", "install", "-q", "--isolated", "--no-index"]
    command += ["--no-compile", "--ignore-installed", "--target", str(tmp_path)]
    command += [f"--find-links={folder}" for folder in folders]
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
    subprocess.run([*command, part.distribution], env=environment, check=True)
    found = {each.metadata["Name"] for each in importlib.metadata.distributions(path=[tmp_path])}
    assert set(filter(workspace.is_ours, found)) == {part.distribution, *part.siblings}
    assert (tmp_path / part.import_name.replace(".", "/") / "__init__.py").is_file()


@pytest.mark.parametrize("name", PACKAGES)
def test_one_package_moves_alone(install_with_bumped, name):
    told = install_with_bumped(name, 2)
    assert told.returncode == 0, told.stderr
    moved = bumped(workspace.find(name).version, 2)
    assert f"fusewright-{name}-{moved}" in told.stdout


@pytest.mark.skipif(not MODELS, reason="the repository has no models yet")
def test_models_refuse_a_package_that_may_have_broken_them(install_with_bumped):
    (models,) = workspace.integration()
    name = models.siblings[0].removeprefix("fusewright-")
    place = 1 if workspace.find(name).version.startswith("0.") else 0
    told = install_with_bumped(name, place)
    assert told.returncode != 0
    assert "conflict" in told.stderr.lower()
