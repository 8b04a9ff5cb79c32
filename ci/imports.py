"""Which module of a package imports which, and where an arrow goes the wrong way.

    python ci/imports.py            every package and the models; says what is wrong
    python ci/imports.py norm       the arrows of one part

Inside a package arrows go one way: operation → launch → kernels → common → _core, and the reference
stands beside them. Type-only imports and lazily imported modules count. Nothing imports a sibling
package, and triton is imported by kernels and tiles alone.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import workspace

Arrows = dict[str, set[str]]
# What a module of a role never reaches, by any way.
FORBIDDEN = {
    "launch": {"operation"},
    "kernels": {"operation", "launch"},
    "reference": {"operation", "launch", "kernels"},
    "common": {"operation", "launch", "kernels", "reference", "family"},
    "core": {"operation", "launch", "kernels", "reference", "family", "common"},
}


class Imports(NamedTuple):
    """What one module imports: modules of its own part, and whole names from elsewhere."""

    inside: set[str]
    outside: set[str]


def modules(folder: Path) -> dict[str, Path]:
    """Dotted name below the part's import folder, "" for its ``__init__``, to file."""
    found = {}
    for path in files(folder):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def files(folder: Path) -> Iterator[Path]:
    """Every Python file below a folder, through symbolic links too."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            yield from files(path)
        elif path.suffix == ".py":
            yield path


def read(name: str, path: Path, known: dict[str, Path]) -> Imports:
    """The imports of one module, written anywhere in it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    inside: set[str] = set()
    outside: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            target = ".".join(part for part in base if part)
            for alias in node.names:
                whole = f"{target}.{alias.name}".strip(".")
                inside.add(whole if whole in known else target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_module":
            inside.add(".".join([*package, ast.literal_eval(node.args[1])]))
    return Imports(inside - {name}, outside)


def role(name: str, operations: set[str]) -> str:
    """What a module is in its package."""
    first, _, last = name.rpartition(".")
    if name.split(".")[0] in ("_core", "common"):
        return name.split(".")[0].strip("_")
    if name in operations:
        return "operation"
    for known in ("launch", "kernels", "tiles", "reference"):
        if last.startswith(known) or last.endswith(f"_{known}"):
            return "kernels" if known == "tiles" else known
    return "family" if first else "package"


def reach(arrows: Arrows, start: str) -> set[str]:
    """Every module that ``start`` imports, directly or through others."""
    seen, waiting = set(), [start]
    while waiting:
        for target in arrows.get(waiting.pop(), ()):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


def circles(arrows: Arrows) -> list[str]:
    return [
        f"{name} imports itself, through others" for name in arrows if name in reach(arrows, name)
    ]


def between_folders(arrows: Arrows) -> Arrows:
    """The same arrows between the folders of a package."""
    found: Arrows = {}
    for name, targets in arrows.items():
        here = name.split(".")[0]
        found.setdefault(here, set()).update({t.split(".")[0] for t in targets} - {here})
    found.pop("", None)
    return found


def problems(part: workspace.Project) -> list[str]:
    """Everything in a part's imports that goes the wrong way."""
    known = modules(part.import_folder)
    imports = {name: read(name, path, known) for name, path in known.items()}
    arrows = {name: found.inside & known.keys() for name, found in imports.items()}
    told = circles({name: targets for name, targets in arrows.items() if name})
    siblings = {
        f"{name} imports {other}"
        for name, found in imports.items()
        for other in found.outside
        if part.is_package and other.split(".")[0].startswith(workspace.FAMILY)
    }
    if not part.is_package:
        return sorted([*told, *siblings])
    told += [f"folder {line}" for line in circles(between_folders(arrows))]
    operations = {target for target in arrows[""] if not target.startswith(("_core", "common"))}
    roles = {name: role(name, operations) for name in known}
    for name in arrows:
        forbidden = FORBIDDEN.get(roles[name], set())
        told += [
            f"{name} ({roles[name]}) reaches {target} ({roles[target]})"
            for target in sorted(reach(arrows, name))
            if roles[target] in forbidden
        ]
        lacks = sorted(imports[name].inside - known.keys())
        told += [f"{name} imports {target}, which is not there" for target in lacks]
    for name, found in imports.items():
        needs_triton = any(other.split(".")[0] == "triton" for other in found.outside)
        last = name.rpartition(".")[2]
        if needs_triton and roles[name] != "kernels" and not last.startswith(("tiles", "kernels")):
            told.append(f"{name} ({roles[name]}) imports triton")
    return sorted([*told, *siblings])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?")
    name = parser.parse_args().name
    if name:
        part = workspace.find(name)
        known = modules(part.import_folder)
        for module, path in known.items():
            targets = sorted(read(module, path, known).inside)
            print(f"{module or part.import_name} → {', '.join(targets)}")
    parts = [workspace.find(name)] if name else [*workspace.packages(), *workspace.integration()]
    told = [f"{part.name}: {line}" for part in parts for line in problems(part)]
    print("\n".join(told), end="\n" if told else "", file=sys.stderr)
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
