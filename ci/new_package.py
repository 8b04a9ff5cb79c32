"""Lays out a new package around a first operation that works.

    python ci/new_package.py memory-mlp

``template/`` is that package under the name "example". Its ``_core`` is a relative symbolic link to
the modules that every package carries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import readme
import workspace

# What nox calls the parts that are no packages.
TAKEN = ("integration", "new", "testkit")


def renamed(text: str, old: str, new: str) -> str:
    """``text`` with the package's word replaced in each of its spellings."""
    old_module, new_module = old.replace("-", "_"), new.replace("-", "_")
    for mark in ("fusewright.", "fusewright_", "fusewright/"):
        text = text.replace(mark + old_module, mark + new_module)
    for mark in ("fusewright-", "packages/"):
        text = text.replace(mark + old, mark + new)
    return text


def lay_out(name: str, root: Path = workspace.ROOT) -> workspace.Project:
    """Writes ``packages/<name>`` below ``root`` and returns it."""
    if not workspace.WORD.fullmatch(name):
        raise SystemExit(f"wanted a name like memory-mlp, got {name!r}")
    folder = root / "packages" / name
    if folder.exists() or name in TAKEN:
        raise SystemExit(f"wanted a new name, got {name!r}, which is taken")
    sources = {p.relative_to(readme.TEMPLATE): p for p in readme.TEMPLATE.rglob("*") if p.is_file()}
    for path, source in sources.items():
        if "__pycache__" not in path.parts:
            target = folder / renamed(path.as_posix(), "example", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(source.read_text(), "example", name))
    shutil.copy(workspace.ROOT / "LICENSE", folder)
    project, core = workspace.load(folder), workspace.core(root)
    if not core.exists():
        # Laid out elsewhere to be tried: that place gets its own copy of the core.
        shutil.copytree(workspace.core(), core, ignore=shutil.ignore_patterns("__pycache__"))
    link = project.import_folder / "_core"
    link.symlink_to(os.path.relpath(core, link.parent), target_is_directory=True)
    return project


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="one word, such as memory-mlp")
    project = lay_out(parser.parse_args().name)
    readme.write()
    print(f"{project.folder.relative_to(workspace.ROOT)} is laid out; now replace `scale`:")
    print(f"  the operation, its kernels, reference and tests in {project.import_name}")
    print("  README.md, CHANGELOG.md, the description in pyproject.toml")
    print(f'  nox -s "tests({project.name})"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
