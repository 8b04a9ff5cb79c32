"""Which nox sessions a change calls for, as the JSON list that a workflow's matrix takes.

    python ci/affected.py --against origin/main           asks git which files changed
    python ci/affected.py --against ""                    everything
    python ci/affected.py --files packages/norm/a.py …    takes the files from the command line
    python ci/affected.py --sessions gpu --against …      other sessions than tests and typing

``tests(new)`` and ``typing(new)`` try what ``nox -s new`` lays out; ``transformers`` is the part of
the models' tests that has versions of its own. Pictures, result tables and most prose change
nothing that runs: lint and docs look at them, and they always run. The code of READMEs and of the
pages in docs runs in the tests of the models. Tests of a package wake that package, its source
wakes the models too; packages have no edges among themselves. The core is a part of every package.
A file that no rule knows wakes everything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import PurePosixPath

import workspace

# The sessions that know of "new".
TRY_NEW = ("tests", "typing")
READ_ONLY = {".md", ".png", ".csv"}


def parts_for(path: str, packages: list[str]) -> set[str]:
    """The packages, "integration", "new" and "core", that a changed file concerns."""
    everything = {*packages, "integration", "new", "core"}
    file = PurePosixPath(path)
    match file.parts:
        case ("docs", folder, *_) if file.suffix == ".md" and folder != "decisions":
            return {"integration"}
        case ("integration", "README.md") | ("packages", _, "README.md"):
            return {"integration"}
        case _ if file.suffix in READ_ONLY or file.name == "LICENSE":
            return set()
        case ("docs", *_) | ("mkdocs.yml",):
            return set()
        case ("packages", name, "tests", _, *_) if name in packages:
            return {name}
        case ("packages", name, _, *_) if name in packages:
            return {name, "integration"}
        case ("integration", _, *_):
            return {"integration"}
        case ("ci", "tests", "core", *_):
            return {"core"}
        case ("ci", "template", *_):
            # A tutorial begins with what is laid out.
            return {"new", "core", "integration"}
    return everything


def sessions(paths: list[str], packages: list[str], names: list[str]) -> list[str]:
    """``names`` × the concerned parts, in the order of the workspace."""
    concerned = set().union(*(parts_for(path, packages) for path in paths))
    order = [part for part in (*packages, "integration", "new", "core") if part in concerned]
    tried = {"new": TRY_NEW, "core": ("tests",)}
    told = [f"{n}({part})" for n in names for part in order if n in tried.get(part, names)]
    return told + ["transformers"] * ("tests(integration)" in told)


def changed_files(base: str) -> list[str]:
    """What HEAD changed since it left ``base``; of a moved file both names."""
    command = ["git", "diff", "--name-only", "--no-renames", f"{base}...HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--against", metavar="REVISION")
    which.add_argument("--files", nargs="*")
    parser.add_argument("--sessions", nargs="+", default=["tests", "typing"])
    arguments = parser.parse_args()
    if arguments.against is None:
        paths = arguments.files
    else:
        paths = changed_files(arguments.against) if arguments.against else ["noxfile.py"]
    names = [package.name for package in workspace.packages()]
    print(json.dumps(sessions(paths, names, arguments.sessions)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
