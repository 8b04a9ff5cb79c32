"""A package's GPU tests and benchmarks in the Python that runs this, with the torch that it has.

    python ci/on_gpu.py norm --tests --bench --out DIR
    python ci/on_gpu.py all --tests -- -n 8

Nothing is installed and no index is asked, because a machine with a GPU often carries its own
torch and reaches none: the package and the testkit run from source. ``--installed`` uses what is
installed instead, as the nox sessions ``gpu`` and ``bench`` do. What follows ``--`` goes to
pytest, or to the benchmarks where those alone are asked for. ``all`` runs the tests of all parts,
three parts at a time. A GPU run that executes no GPU test is an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import closing_line
import workspace
from quick import pytest_command

ALL = "all"
# Parts whose tests run at one time: while the last tests of one end, those of another fill the GPU.
AT_ONCE = 3


def run_tests(project: workspace.Project, environment: dict[str, str], more: list[str]) -> bool:
    """True when GPU tests ran and none failed."""
    # From elsewhere, so that only the import path decides what is tested.
    with tempfile.TemporaryDirectory() as elsewhere:
        junit = Path(elsewhere, "gpu.xml")
        command = pytest_command(
            project, "gpu", f"--junitxml={junit}", "--durations=5", "-rs", *more
        )
        code = subprocess.run(command, env=environment, cwd=elsewhere).returncode
        ran = closing_line.read(junit) if junit.is_file() else Counter()
    if not ran["passed"] + ran["failed"]:
        print(f"on_gpu: no GPU test of {project.name} was executed", file=sys.stderr)
        return False
    return code == 0


def run_bench(
    project: workspace.Project, out: Path, environment: dict[str, str], more: list[str]
) -> bool:
    """True when the benchmarks ran to their end."""
    # The models bring a harness of their own, which needs no testkit.
    module = ("fusewright_testkit.bench", project.name)
    if not project.is_package:
        module = (f"{project.import_name}.bench",)
    command = [sys.executable, "-m", *module, "--out", str(out), *more]
    return subprocess.run(command, env=environment).returncode == 0


def text_for_gpus(part: workspace.Project) -> int:
    """How long the files are that ask something of a GPU."""
    texts = [path.read_text() for path in part.tests.rglob("*.py")]
    return sum(len(text) for text in texts if "mark.gpu" in text or "conformance" in text)


def run_all(arguments: list[str]) -> bool:
    """The tests of all parts, those with most for a GPU first: True when every part's passed."""
    parts = [*workspace.packages(), *workspace.integration()]
    parts.sort(key=lambda part: -text_for_gpus(part))

    def run(part: workspace.Project) -> bool:
        command = [sys.executable, __file__, part.name, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(f"== {part.name}\n{done.stdout}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return all(list(pool.map(run, parts)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="a part, or all")
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="of the benchmarks; default: the package's results"
    )
    parser.add_argument("--installed", action="store_true")
    ours, more = sys.argv[1:], []
    if "--" in ours:
        ours, more = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    arguments = parser.parse_args(ours)
    if not (arguments.tests or arguments.bench):
        parser.error("wanted --tests, --bench or both")
    if arguments.out and not arguments.bench:
        parser.error(f"wanted --bench with --out, which is the benchmarks', got {arguments.out}")
    if arguments.name == ALL:
        if arguments.bench:
            parser.error("wanted one part with --bench, which has the GPU to itself, got all")
        options = ["--tests", *(["--installed"] if arguments.installed else []), "--", *more]
        return not run_all(options)
    project = workspace.find(arguments.name)
    with workspace.source_environment(project) as environment:
        if arguments.installed:
            environment = dict(os.environ)
        good = True
        if arguments.tests:
            good = run_tests(project, environment, more)
        if arguments.bench:
            out = (arguments.out or project.folder / "results").resolve()
            good &= run_bench(project, out, environment, [] if arguments.tests else more)
    return not good


if __name__ == "__main__":
    sys.exit(main())
