"""Small rules for every file that git would keep: line ends, final newlines, size.

python ci/check_text.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import workspace

LARGEST = 1 << 20


def problems(name: str, content: bytes) -> list[str]:
    """What is wrong with a file of this content; of a binary one only its size counts."""
    if len(content) > LARGEST:
        return [f"{name}: {len(content) >> 10} KiB, wanted at most {LARGEST >> 10}"]
    if b"\0" in content or not content:
        return []
    told = []
    if b"\r" in content:
        told.append(f"{name}: carriage returns")
    if not content.endswith(b"\n") or content.endswith(b"\n\n"):
        told.append(f"{name}: wanted exactly one newline at the end")
    for number, line in enumerate(content.splitlines(), 1):
        if line != line.rstrip():
            told.append(f"{name}:{number}: blanks at the end of the line")
    return told


def files(root: Path = workspace.ROOT) -> list[Path]:
    command = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = [root / name for name in names.split("\0") if name]
    return [path for path in paths if path.is_file()]


def main() -> int:
    told = []
    for path in files():
        told += problems(path.relative_to(workspace.ROOT).as_posix(), path.read_bytes())
    print("\n".join(told), end="\n" if told else "", file=sys.stderr)
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
