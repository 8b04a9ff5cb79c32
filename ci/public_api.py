"""The public surface of a package, read from its source: ``__all__`` with its signatures.

Nothing is imported, so that the surface of an old tag can be read without its dependencies. Names
are followed through relative imports; a re-exported module contributes its own public functions
and classes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Gives the text of a file by its path inside the import folder, or None where there is none.
Reader = Callable[[str], str | None]
Surface = dict[str, "Signature"]


class Parameter(NamedTuple):
    kind: str
    name: str
    annotation: str
    default: str | None


class Signature(NamedTuple):
    """What a caller relies on; only a function has parameters and a result."""

    what: str
    parameters: tuple[Parameter, ...] = ()
    result: str = ""

    def __str__(self) -> str:
        marks = {"*": "*", "**": "**"}
        told, keyword = [], False
        for kind, name, annotation, default in self.parameters:
            if kind == "keyword" and not keyword:
                keyword = True
                told += ["*"] if not any(p.kind == "*" for p in self.parameters) else []
            text = marks.get(kind, "") + name + (f": {annotation}" if annotation else "")
            told.append(text + (f" = {default}" if default is not None else ""))
        arrow = f" -> {self.result}" if self.result and self.what == "def" else ""
        return f"{self.what} ({', '.join(told)}){arrow}" if self.what == "def" else self.what


def folder_reader(folder: Path) -> Reader:
    def read(name: str) -> str | None:
        path = folder / name
        return path.read_text() if path.is_file() else None

    return read


def surface(read: Reader) -> Surface:
    """Every public name of a package, with ``Class.method`` and ``module.name``."""
    found: Surface = {}
    tree = parse(read, "__init__.py")
    for name in exported(tree):
        found |= describe(read, "__init__.py", name, name)
    return dict(sorted(found.items()))


def parse(read: Reader, file: str) -> ast.Module:
    text = read(file)
    if text is None:
        raise FileNotFoundError(f"wanted {file} in the package, got no such file")
    return ast.parse(text)


def exported(tree: ast.Module) -> list[str]:
    """``__all__`` as written; without one, every public function and class defined here."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    defined = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, defined) and not n.name.startswith("_")]


def describe(read: Reader, file: str, name: str, shown: str) -> Surface:
    """What ``name`` of ``file`` is, under the name ``shown``."""
    for node in parse(read, file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {shown: function_signature(node)}
        if isinstance(node, ast.ClassDef) and node.name == name:
            return class_signatures(node, shown)
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return follow(read, file, node, alias.name, shown)
    return {shown: Signature("value")}


def follow(read: Reader, file: str, node: ast.ImportFrom, name: str, shown: str) -> Surface:
    """What ``from .module import name`` brings, under the name ``shown``."""
    target, inside = imported(read, file, node, name)
    if inside:
        return describe(read, target, inside, shown)
    found: Surface = {shown: Signature("module")}
    for inner in exported(parse(read, target)):
        found |= describe(read, target, inner, f"{shown}.{inner}")
    return found


def imported(read: Reader, file: str, node: ast.ImportFrom, name: str) -> tuple[str, str]:
    """File and name that ``from .module import name`` means; no name where that is a module."""
    base = PurePosixPath(file).parents[node.level - 1]
    module = base.joinpath(*(node.module or "").split("."))
    as_module = module_file(read, module / name)
    if as_module is not None:
        return as_module, ""
    target = module_file(read, module)
    if target is None:
        raise FileNotFoundError(f"wanted the module {module} that {file} imports, got no such file")
    return target, name


def definition(read: Reader, file: str, name: str) -> tuple[str, str]:
    """The file that defines ``name`` of ``file``, and the name there; no name for a module."""
    for node in parse(read, file).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    target, inside = imported(read, file, node, alias.name)
                    return definition(read, target, inside) if inside else (target, "")
    return file, name


def module_file(read: Reader, module: PurePosixPath) -> str | None:
    for file in (f"{module}.py", str(module / "__init__.py")):
        if read(file) is not None:
            return file
    return None


def function_signature(node: ast.FunctionDef) -> Signature:
    def text(part: ast.expr | None) -> str:
        return ast.unparse(part) if part is not None else ""

    def make(kind: str, argument: ast.arg, default: ast.expr | None) -> Parameter:
        value = ast.unparse(default) if default is not None else None
        return Parameter(kind, argument.arg, text(argument.annotation), value)

    arguments, parameters = node.args, []
    positional = [("position", a) for a in arguments.posonlyargs]
    positional += [("either", a) for a in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for (kind, argument), default in zip(positional, defaults, strict=True):
        parameters.append(make(kind, argument, default))
    if arguments.vararg:
        parameters.append(make("*", arguments.vararg, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(make("keyword", argument, default))
    if arguments.kwarg:
        parameters.append(make("**", arguments.kwarg, None))
    return Signature("def", tuple(parameters), text(node.returns))


def class_signatures(node: ast.ClassDef, shown: str) -> Surface:
    found = {shown: Signature(f"class ({', '.join(map(ast.unparse, node.bases))})")}
    for member in node.body:
        public = isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
        if public or (isinstance(member, ast.FunctionDef) and member.name == "__init__"):
            found[f"{shown}.{member.name}"] = function_signature(member)
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            found[f"{shown}.{member.target.id}"] = Signature(
                f"field {ast.unparse(member.annotation)}"
            )
    return found


def still_accepts(old: Signature, new: Signature) -> bool:
    """True when every call that fitted ``old`` fits ``new``: only optional parameters came."""
    if (old.what, old.result) != (new.what, new.result):
        return False

    def split(signature: Signature) -> tuple[list[Parameter], set[Parameter]]:
        by_place = [p for p in signature.parameters if p.kind != "keyword"]
        return by_place, {p for p in signature.parameters if p.kind == "keyword"}

    (old_places, old_keywords), (new_places, new_keywords) = split(old), split(new)
    added = [*new_places[len(old_places) :], *(new_keywords - old_keywords)]
    kept = new_places[: len(old_places)] == old_places and old_keywords <= new_keywords
    return kept and all(p.default is not None for p in added)


def difference(old: Surface, new: Surface) -> tuple[list[str], list[str]]:
    """What breaks a caller, and what only adds, one line each."""
    breaking, adding = [], []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            breaking.append(f"removed {name}: {old[name]}")
        elif name not in old:
            adding.append(f"added {name}: {new[name]}")
        elif old[name] != new[name]:
            line = f"changed {name}: {old[name]}  →  {new[name]}"
            (adding if still_accepts(old[name], new[name]) else breaking).append(line)
    return breaking, adding
