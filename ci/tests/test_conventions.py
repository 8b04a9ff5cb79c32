"""What CONTRIBUTING and docs/decisions/0016-house.md say of the packages' source is so."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator

import public_api
import pytest
import typed_calls
import workspace

MOST_CONSTANTS = 9
# The module that a distribution of another name brings.
MODULES = {"fla-core": "fla"}


def sources(part: workspace.Project) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(part.import_folder.rglob("*.py")):
        yield str(path.relative_to(workspace.ROOT)), ast.parse(path.read_text())


def roots(node: ast.AST) -> set[str]:
    """The first names of what is imported from elsewhere anywhere in it."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            found |= {name.name.partition(".")[0] for name in each.names}
        if isinstance(each, ast.ImportFrom) and not each.level and each.module:
            found.add(each.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"torch", "triton"}


def module_of(requirement: str) -> str:
    name = requirement.partition(">")[0].partition("=")[0].partition("[")[0].strip()
    return MODULES.get(name, name)


@pytest.mark.parametrize("part", workspace.packages(), ids=lambda part: part.name)
def test_other_libraries_are_imported_inside_one_function_and_named_by_an_extra(part):
    project = tomllib.loads((part.folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    allowed = {module_of(requirement) for some in extras for requirement in some}
    users = set()
    for name, tree in sources(part):
        for statement in tree.body:
            found = roots(statement)
            assert not found or isinstance(statement, ast.FunctionDef), (name, found)
            assert found <= allowed, (name, found)
            users |= {(name, statement.name) for _ in found}
    assert len(users) <= 1


def constants_of(kernel: ast.FunctionDef) -> list[str]:
    arguments = kernel.args.args
    return [x.arg for x in arguments if x.annotation and "constexpr" in ast.unparse(x.annotation)]


@pytest.mark.parametrize("part", workspace.packages(), ids=lambda part: part.name)
def test_constants_of_a_kernel_are_one_record_or_few(part):
    kernels = [
        (name, each)
        for name, tree in sources(part)
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name.endswith("_kernel")
    ]
    for name, kernel in kernels:
        constants = constants_of(kernel)
        if "CONFIG" in constants:
            assert constants == ["CONFIG"], (name, kernel.name)
        assert len(constants) <= MOST_CONSTANTS, (name, kernel.name)
        if part.name in ("hyper-connections", "reversible"):
            assert "CONFIG" not in constants, (name, kernel.name)


PARTS = [*workspace.packages(), *workspace.integration()]
# What torch's modules and optimizers have too, whose docstring `help` shows where ours has none.
TORCHS = {"__init__", "extra_repr", "forward", "reset_parameters", "step", "zero_grad"}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_module_types_its_call_by_its_forward(part):
    for name, tree in sources(part):
        for module in filter(typed_calls.is_module, ast.walk(tree)):
            typed = [
                ast.unparse(method.decorator_list[0])
                for node in module.body
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
                for method in node.body
                if isinstance(method, ast.FunctionDef) and method.name == "__call__"
            ]
            assert typed == ["called_as(forward)"], (name, module.name)


@pytest.mark.parametrize("part", workspace.packages(), ids=lambda part: part.name)
def test_help_of_a_public_class_speaks_of_ours(part):
    read = public_api.folder_reader(part.import_folder)
    for name in public_api.exported(public_api.parse(read, "__init__.py")):
        file, inside = public_api.definition(read, "__init__.py", name)
        for each in public_api.parse(read, file).body:
            if isinstance(each, ast.ClassDef) and each.name == inside and each.bases:
                methods = [node for node in each.body if isinstance(node, ast.FunctionDef)]
                mute = {m.name for m in methods if not ast.get_docstring(m)}
                assert mute & TORCHS == set(), name
