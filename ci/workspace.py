"""What this repository holds, read from the pyproject.toml of each part; nothing is listed by hand.

A package is one word in five spellings:

    packages/memory-mlp         its folder
    fusewright-memory-mlp       its distribution
    fusewright.memory_mlp       its import
    memory-mlp-v0.1.0           its release tag
    fusewright_memory_mlp::     its op namespace

``python ci/workspace.py`` prints every part with its version and the siblings that it declares.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAMILY = "fusewright"
WORD = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# The tests that every machine runs: pytest's expression for what carries neither marker.
QUICK_TIER = "not gpu and not slow"


@dataclass(frozen=True)
class Project:
    """One distribution of this repository."""

    folder: Path
    distribution: str
    version: str
    description: str
    dependencies: tuple[str, ...]
    build_requirements: tuple[str, ...]
    groups: dict[str, tuple[str, ...]] = field(compare=False)
    extras: dict[str, tuple[str, ...]] = field(compare=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_package(self) -> bool:
        return self.folder.parent.name == "packages"

    @property
    def import_name(self) -> str:
        word = self.distribution.removeprefix(f"{FAMILY}-").replace("-", "_")
        return f"{FAMILY}.{word}" if self.is_package else f"{FAMILY}_{word}"

    @property
    def namespace(self) -> str:
        """The torch.library namespace of the package's ops."""
        return self.import_name.replace(".", "_")

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def import_folder(self) -> Path:
        return self.source.joinpath(*self.import_name.split("."))

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def wheel(self) -> str:
        """The file that is built of it."""
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def siblings(self) -> tuple[str, ...]:
        """The distributions of this repository that this one requires."""
        return tuple(n for n in map(requirement_name, self.dependencies) if is_ours(n))


def requirement_name(requirement: str) -> str:
    """The normalised distribution name that a requirement starts with."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise ValueError(f"wanted a requirement that starts with a name, got {requirement!r}")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def is_ours(distribution: str) -> bool:
    return distribution == FAMILY or distribution.startswith(f"{FAMILY}-")


def load(folder: Path) -> Project:
    """Reads the one pyproject.toml of ``folder``."""
    with (folder / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)
    project, groups = table["project"], table.get("dependency-groups", {})
    return Project(
        folder=folder,
        distribution=project["name"],
        version=project["version"],
        description=project.get("description", ""),
        dependencies=tuple(project.get("dependencies", ())),
        build_requirements=tuple(table["build-system"]["requires"]),
        groups={name: tuple(expand_group(groups, name)) for name in groups},
        extras={name: tuple(x) for name, x in project.get("optional-dependencies", {}).items()},
    )


def expand_group(groups: dict[str, list], name: str) -> list[str]:
    """The requirements of a dependency group, with the groups that it includes."""
    requirements = []
    for entry in groups[name]:
        if isinstance(entry, str):
            requirements.append(entry)
        else:
            requirements += expand_group(groups, entry["include-group"])
    return requirements


def repository(root: Path = ROOT) -> str:
    """Where the repository is browsed and cloned; "" where pyproject.toml says nothing yet."""
    with (root / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["fusewright"]["repository"].rstrip("/")


def packages(root: Path = ROOT) -> list[Project]:
    return [load(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


def integration(root: Path = ROOT) -> list[Project]:
    """The models, as a list of one; empty where the folder is missing."""
    return [load(path.parent) for path in root.glob("integration/pyproject.toml")]


def kit(root: Path = ROOT) -> Project:
    return load(root / "ci/testkit")


def core(root: Path = ROOT) -> Path:
    """The modules that every package carries as its subpackage ``_core``."""
    return root / "packages/_core"


def find(name: str, root: Path = ROOT) -> Project:
    """The package or the models by directory name; any part by its folder's path."""
    if "/" in name:
        return load(Path(name).resolve())
    known = {project.name: project for project in packages(root) + integration(root)}
    if name not in known:
        raise SystemExit(f"wanted one of {', '.join(known)}; got {name!r}")
    return known[name]


def needed_for(project: Project, root: Path = ROOT) -> list[Project]:
    """What is tested together, beside the testkit: a package by itself, the models with all."""
    return [project] if project.is_package else [*packages(root), project]


def third_party(projects: Iterable[Project], *groups: str) -> list[str]:
    """Every third-party requirement of the projects and of their named groups."""
    lines = set()
    for project in projects:
        lines |= set(project.dependencies)
        lines |= {line for group in groups for line in project.groups.get(group, ())}
    return sorted(line for line in lines if not is_ours(requirement_name(line)))


@contextmanager
def source_environment(project: Project, root: Path = ROOT) -> Iterator[dict[str, str]]:
    """An environment in which a project and the testkit are imported from source.

    A folder of bare metadata is the last entry of its import path, so that ``importlib.metadata``
    knows the versions of distributions that are not installed.
    """
    projects = [*needed_for(project, root), kit(root)]
    with tempfile.TemporaryDirectory(prefix=f"{FAMILY}-") as metadata:
        for each in projects:
            stem = each.distribution.replace("-", "_")
            folder = Path(metadata, f"{stem}-{each.version}.dist-info")
            folder.mkdir()
            header = f"Metadata-Version: 2.1\nName: {each.distribution}\nVersion: {each.version}\n"
            (folder / "METADATA").write_text(header)
        path = [
            *(str(each.source) for each in projects),
            os.environ.get("PYTHONPATH", ""),
            metadata,
        ]
        yield os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def main() -> int:
    for project in [*packages(), *integration(), kit()]:
        edges = ", ".join(project.siblings) or "none of ours"
        print(f"{project.tag:24} {project.import_name:26} requires {edges}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
