"""One shared layer of everybody else's packages, seen by many thin environments.

torch and triton make an environment of 1.7 GB and half a minute. So they are installed once,
under the constraints, into a virtual environment of their own; a thin environment sees that layer
through one .pth file and itself holds only what is under test.

    python ci/third_party.py FOLDER      run by the thin environment's Python

makes the layer in FOLDER unless one with the same requirements is there, and writes the .pth file.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import workspace

CONSTRAINTS = workspace.ROOT / "ci/constraints/tested.txt"
PTH = "third_party.pth"


def requirements(root: Path = workspace.ROOT) -> list[str]:
    """What running any part of the repository, testing it and building its wheel takes."""
    projects = [*workspace.packages(root), *workspace.integration(root), workspace.kit(root)]
    builders = {line for project in projects for line in project.build_requirements}
    return sorted({*workspace.third_party(projects, "test"), *builders})


def fingerprint(lines: list[str], constraints: str) -> str:
    """Changes with anything that could change what the layer holds."""
    text = "\n".join([sys.version, sys.platform, constraints, *lines])
    return hashlib.sha256(text.encode()).hexdigest()


def site_packages(layer: Path) -> Path:
    scheme = {"base": str(layer), "platbase": str(layer)}
    return Path(sysconfig.get_path("purelib", "venv", scheme))


def ensure(layer: Path, lines: list[str], constraints: Path = CONSTRAINTS) -> Path:
    """Builds the layer unless it is there already; returns its site-packages."""
    stamp, wanted = layer / "fingerprint", fingerprint(lines, constraints.read_text())
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"building the third-party layer in {layer}", flush=True)
        shutil.rmtree(layer, ignore_errors=True)
        venv.create(layer, with_pip=True)
        listing = layer / "requirements.txt"
        listing.write_text("\n".join(lines) + "\n")
        python = Path(sysconfig.get_path("scripts", "venv", {"base": str(layer)})) / "python"
        # What is imported is compiled then. Compiling all of it takes a minute.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "-r", str(listing), "-c", str(constraints)], check=True)
        # Written last, so that an interrupted build is done again.
        stamp.write_text(wanted)
    return site_packages(layer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    layer = parser.parse_args().folder.resolve()
    seen = ensure(layer, requirements())
    Path(sysconfig.get_path("purelib"), PTH).write_text(f"{seen}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
