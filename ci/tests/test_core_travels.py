"""However a package is installed, it holds the core as files and names no sibling."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import check_wheel
import pytest
import workspace

PACKAGES = workspace.packages()
CORE = {path.name: path.read_bytes() for path in workspace.core().glob("*.py")}
NORM = workspace.find("norm")
HELD = "fusewright/norm/_core"


def hatchling(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hatchling", "build", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def pip_install(requirement: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), requirement], check=True)


def held(folder: Path) -> dict[str, bytes]:
    """The modules of the core below an import path, which must be no links."""
    paths = list((folder / HELD).glob("*.py"))
    assert not any(path.is_symlink() for path in [folder / HELD, *paths])
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_package_carries_the_core_as_a_relative_link(package):
    link = package.import_folder / "_core"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == workspace.core().resolve()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_wheel_holds_the_core_and_names_no_sibling(package, build_wheels):
    dist = build_wheels(package)
    assert check_wheel.problems(package, dist) == []
    (wheel,) = dist.glob("*.whl")
    others = {other.import_name for other in PACKAGES} - {package.import_name}
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".py")]
        words = {word for name in modules for word in archive.read(name).decode().split()}
    assert others & words == set()


def test_sdist_builds_a_wheel_with_the_core(tmp_path):
    assert hatchling(NORM.folder, "-t", "sdist", "-d", str(tmp_path)).returncode == 0
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert hatchling(folder, "-t", "wheel", "-d", str(tmp_path)).returncode == 0
    assert check_wheel.problems(NORM, tmp_path) == []


def test_pip_installs_the_core_from_the_packages_folder(tmp_path):
    pip_install(str(NORM.folder), tmp_path)
    assert held(tmp_path) == CORE


def test_pip_installs_the_core_from_a_git_subdirectory(tmp_path):
    pip_install(f"git+{workspace.ROOT.as_uri()}#subdirectory=packages/norm", tmp_path)
    committed = subprocess.run(
        ["git", "-C", str(workspace.ROOT), "archive", "HEAD", "packages/_core"],
        check=True,
        capture_output=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(committed)) as archive:
        files = [member for member in archive if member.name.endswith(".py")]
        wanted = {Path(m.name).name: archive.extractfile(m).read() for m in files}
    assert held(tmp_path) == wanted


def test_editable_installation_reaches_the_core(tmp_path):
    code = "import sys, hatchling.build; hatchling.build.build_editable(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=NORM.folder, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    # Where Python finds the package with this site folder, which holds a piece of it too.
    look = (
        "import importlib.util, site, sys; site.addsitedir(sys.argv[1]); "
        "print(importlib.util.find_spec('fusewright.norm').origin)"
    )
    command = [sys.executable, "-c", look, str(tmp_path / "site")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    package = Path(told.strip()).parent
    assert package == NORM.import_folder
    assert {path.name: path.read_bytes() for path in (package / "_core").glob("*.py")} == CORE


def test_a_checkout_without_links_builds_no_wheel(tmp_path):
    """There the link is a text file with its target, as in a .zip archive."""
    folder = tmp_path / "packages/norm"
    shutil.copytree(NORM.folder, folder, ignore=shutil.ignore_patterns("_core", "results"))
    (folder / "src" / HELD).write_text("../../../../_core")
    told = hatchling(folder, "-t", "wheel", "-d", str(tmp_path / "dist"))
    assert told.returncode != 0
    assert "_core/__init__.py" in told.stderr + told.stdout
