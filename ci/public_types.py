"""Whether the public surface of an installed package is fully typed, as basedpyright sees it.

    python ci/public_types.py packages/norm

basedpyright takes every module without a leading underscore for public. Here a name is public that
the package's ``__init__`` imports, and what it has.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import workspace


def public_names(package: str, init: str) -> list[str]:
    """What the ``__init__`` of a package imports, by where it is defined."""
    names = []
    for node in ast.parse(init).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            module = f"{package}.{node.module}" if node.module else package
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def untyped(report: dict, public: list[str]) -> list[str]:
    """What basedpyright says of these names, and of what they have, whose type it does not know for
    certain.

    Raises:
        ValueError: the report has no symbols: the package was not found.
    """
    symbols = report["typeCompleteness"]["symbols"]
    if not symbols:
        raise ValueError("wanted a report on an installed package, got one without symbols")
    prefixes = tuple(f"{name}." for name in public)
    return [
        f"{symbol['name']}: {'; '.join(x['message'] for x in symbol['diagnostics'])}"
        for symbol in symbols
        if symbol["isExported"]
        and f"{symbol['name']}.".startswith(prefixes)
        and (not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"])
    ]


def main() -> int:
    project = workspace.load(Path(sys.argv[1]))
    init = project.source.joinpath(*project.import_name.split("."), "__init__.py").read_text()
    command = ["basedpyright", "--verifytypes", project.import_name, "--ignoreexternal"]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True)
    found = untyped(json.loads(done.stdout), public_names(project.import_name, init))
    print(*found, sep="\n")
    print(f"{project.import_name}: {len(found)} public symbols without a certain type")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
