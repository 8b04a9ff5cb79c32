"""Classes and functions of the built documentation that are shown without what they take.

    python ci/check_site.py .nox/site

A dead link fails the build itself; a signature that is not found does not.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

# Several signatures stand in a block of their own.
HEADING = re.compile(
    r'<h[2-6] id="([^"]+)" class="doc doc-heading">.*?</h[2-6]>\s*'
    r'(?:<div class="doc-overloads">\s*)?(<div[^>]*>)?',
    re.DOTALL,
)
SIGNATURE = "doc-signature"


def unsigned(page: str) -> list[str]:
    """The names whose heading no signature follows."""
    return [found[1] for found in HEADING.finditer(page) if SIGNATURE not in (found[2] or "")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    pages = sorted(parser.parse_args().site.glob("**/reference/index.html"))
    if not pages:
        print("wanted pages of functions in the site, got none", file=sys.stderr)
        return 1
    told = [name for page in pages for name in unsigned(page.read_text())]
    for name in told:
        print(f"{name} is shown without its signature", file=sys.stderr)
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
