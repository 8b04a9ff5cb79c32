"""All tables and pictures of results again from the committed rows; nothing is timed.

    python ci/redraw.py [norm gsa integration]

takes the Python that runs this, in which torch, typer and matplotlib have to be installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import workspace


def commands(names: list[str]) -> list[list[str]]:
    """A command for the packages of these names and one for the models; of no names all."""
    packages = [p for p in workspace.packages() if not names or p.name in names]
    models = [p for p in workspace.integration() if not names or p.name in names]
    found = []
    if packages:
        folders = [str(package.folder) for package in packages]
        found.append([sys.executable, "-m", "fusewright_testkit.report", *folders])
    return found + [[sys.executable, str(each.folder / "report.py")] for each in models]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="packages, or integration; all without a name")
    names = parser.parse_args().names
    for name in names:
        workspace.find(name)
    (models,) = workspace.integration()
    with workspace.source_environment(models) as environment:
        ended = [subprocess.run(each, env=environment).returncode for each in commands(names)]
    # One that a signal has ended has a number below 0.
    return int(any(ended))


if __name__ == "__main__":
    sys.exit(main())
