"""One part's tests from source, in the Python that runs this, nothing built and nothing installed.

    python ci/quick.py norm -k rms

Whatever follows the name goes to pytest. This is the inner loop; ``nox -s "tests(norm)"`` is the
truth.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys

import workspace

PLUGIN = "fusewright_testkit.entry"


def pytest_command(project: workspace.Project, tier: str, *more: str) -> list[str]:
    """The command that runs one tier of a part's tests with the testkit's plugin."""
    command = [sys.executable, "-m", "pytest", str(project.tests), "-m", tier]
    command += ["-c", str(workspace.ROOT / "pyproject.toml"), "--rootdir", str(workspace.ROOT)]
    # An installed testkit announces its plugin itself, and pytest refuses to load it twice.
    if not any(e.value == PLUGIN for e in importlib.metadata.entry_points(group="pytest11")):
        command += ["-p", PLUGIN]
    return [*command, *more]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    arguments, more = parser.parse_known_args()
    project = workspace.find(arguments.name)
    with workspace.source_environment(project) as environment:
        command = pytest_command(project, workspace.QUICK_TIER, *more)
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
