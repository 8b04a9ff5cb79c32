"""The repository describes itself, and one word names a package in five spellings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import workspace

PACKAGES = workspace.packages()
PARTS = [*PACKAGES, *workspace.integration()]
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
each_part = pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)


def imported_names(folder: Path) -> set[str]:
    """Every module that the Python files below ``folder`` import absolutely."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module)
    return names


def test_packages_are_discovered_by_their_folders(repository):
    names = [project.name for project in workspace.packages(repository)]
    assert names == ["memory-mlp", "norm"]
    assert [p.distribution for p in workspace.integration(repository)] == ["fusewright-models"]
    assert workspace.integration(repository / "packages") == []


def test_one_word_in_five_spellings(repository):
    project = workspace.find("memory-mlp", repository)
    assert project.folder == repository / "packages/memory-mlp"
    assert project.distribution == "fusewright-memory-mlp"
    assert project.import_name == "fusewright.memory_mlp"
    assert project.tag == "memory-mlp-v0.1.0"
    assert project.namespace == "fusewright_memory_mlp"


def test_models_declare_their_edges_and_packages_have_none(repository):
    (models,) = workspace.integration(repository)
    assert models.siblings == ("fusewright-norm", "fusewright-memory-mlp")
    assert models.import_name == "fusewright_models"
    assert all(project.siblings == () for project in workspace.packages(repository))


def test_third_party_requirements_leave_out_ours_and_follow_included_groups(repository):
    projects = [*workspace.packages(repository), *workspace.integration(repository)]
    assert workspace.third_party(projects) == ["torch>=2.11"]
    wanted = ["matplotlib>=3.9", "pytest>=8.4", "torch>=2.11"]
    assert workspace.third_party(projects, "test") == wanted


def test_an_unknown_name_lists_the_known(repository):
    with pytest.raises(SystemExit, match="wanted one of memory-mlp, norm, integration; got 'nrom'"):
        workspace.find("nrom", repository)


def test_source_environment_knows_the_versions_of_what_is_not_installed(repository):
    code = "import importlib.metadata as m, fusewright.norm; print(m.version('fusewright-norm'))"
    with workspace.source_environment(
        workspace.find("norm", repository), repository
    ) as environment:
        command = [sys.executable, "-c", code]
        told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert told.stdout == "0.1.0\n"


@each_package
def test_package_spells_its_word_in_five_ways(package):
    word = package.name
    assert workspace.WORD.fullmatch(word)
    assert package.distribution == f"fusewright-{word}"
    assert (package.import_folder / "__init__.py").is_file()
    namespaces = set()
    for path in package.source.rglob("*.py"):
        namespaces |= set(re.findall(r"fusewright_\w+(?=::)", path.read_text()))
        namespaces |= set(re.findall(r"""Library\(\s*["'](\w+)["']""", path.read_text()))
    assert namespaces <= {package.namespace}


@each_package
def test_nothing_lies_directly_in_the_namespace(package):
    names = [p.name for p in (package.source / "fusewright").iterdir() if p.name != "__pycache__"]
    assert names == [package.import_folder.name]


@each_package
def test_package_imports_nothing_of_ours_but_itself(package):
    assert package.siblings == ()
    ours = {
        n for n in imported_names(package.source) if n.partition(".")[0].startswith("fusewright")
    }
    assert ours == set()


def test_models_declare_every_package_that_they_import():
    for models in workspace.integration():
        imported = {n for n in imported_names(models.source) if n.startswith("fusewright.")}
        declared = {p.import_name for p in PACKAGES if p.distribution in models.siblings}
        assert {".".join(n.split(".")[:2]) for n in imported} <= declared


@each_part
def test_part_carries_the_root_licence(part):
    assert (part.folder / "LICENSE").read_bytes() == (workspace.ROOT / "LICENSE").read_bytes()


@each_part
def test_part_has_what_its_neighbours_have(part):
    files = ["README.md", "pyproject.toml", "src", "tests"]
    files += ["CHANGELOG.md"] if part.is_package else []
    assert [name for name in files if not (part.folder / name).exists()] == []
    assert "pytest" in {workspace.requirement_name(line) for line in part.groups["test"]}
