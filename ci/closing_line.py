"""Sums the JUnit files of many pytest runs into one closing line in pytest's own words.

    python ci/closing_line.py .nox/results --failed lint

``--failed`` names a stage that ended badly. One whose files (``lint.xml``, ``tests-norm.xml``)
show no failed test of its own counts as one error, so that a failed install cannot read as a
success. The exit status is not 0 when anything failed or nothing passed.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

WORDS = {"failed": "failed", "passed": "passed", "skipped": "skipped", "errors": "error"}


def read(path: Path) -> Counter:
    """Counts of one JUnit file: failed, passed, skipped, errors, seconds."""
    counts = Counter()
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        seen = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        bad = seen["failures"] + seen["errors"] + seen["skipped"]
        counts.update(failed=seen["failures"], errors=seen["errors"], skipped=seen["skipped"])
        counts.update(passed=seen["tests"] - bad, seconds=float(suite.get("time", 0)))
    return counts


def total(folder: Path, failed_stages: list[str]) -> Counter:
    """The sum over a folder, with one error for each failed stage that shows no failure itself."""
    counts = Counter()
    for path in sorted(folder.glob("*.xml")):
        counts.update(read(path))
    for stage in failed_stages:
        own = [read(path) for path in folder.glob(f"{stage}*.xml")]
        if not any(each["failed"] or each["errors"] for each in own):
            counts["errors"] += 1
    return counts


def line(counts: Counter) -> str:
    parts = []
    for key, word in WORDS.items():
        if counts[key]:
            plural = "s" if key == "errors" and counts[key] > 1 else ""
            parts.append(f"{counts[key]} {word}{plural}")
    body = f" {', '.join(parts) or 'no tests ran'} in {counts['seconds']:.2f}s "
    return body.center(80, "=")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--failed", action="append", default=[], metavar="STAGE")
    arguments = parser.parse_args()
    counts = total(arguments.folder, arguments.failed)
    print(line(counts))
    return bool(counts["failed"] or counts["errors"] or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
