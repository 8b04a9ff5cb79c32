"""The lowest versions that a part's metadata promises, as a requirements file.

    python ci/minimums.py norm

turns each ``>=x`` of the part's own requirements and of its test group into ``==x``. A
requirement that states no floor is an error: a promise without a number cannot be kept.
"""

from __future__ import annotations

import argparse
import re
import sys

import workspace

FLOOR = re.compile(r">=\s*([0-9][0-9a-z.]*)")


def floor(requirement: str) -> str:
    """``numpy>=2.0,<3; marker`` becomes ``numpy==2.0; marker``."""
    specifier, semicolon, marker = requirement.partition(";")
    match = FLOOR.search(specifier)
    if match is None:
        raise ValueError(f"wanted a requirement with a floor (>=x), got {requirement!r}")
    name = re.match(r"[A-Za-z0-9._-]+(\[[^]]*\])?", specifier.strip())[0]
    return f"{name}=={match[1]}{semicolon}{marker}".strip()


def version_key(pin: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", pin.partition("==")[2].partition(";")[0]))


def floors(requirements: list[str]) -> list[str]:
    """One line per distribution; where two floors are stated, the higher."""
    highest = {}
    for pin in map(floor, requirements):
        name = workspace.requirement_name(pin)
        if name not in highest or version_key(pin) > version_key(highest[name]):
            highest[name] = pin
    return sorted(highest.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    project = workspace.find(parser.parse_args().name)
    projects = [*workspace.needed_for(project), workspace.kit()]
    print("\n".join(floors(workspace.third_party(projects, "test"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
