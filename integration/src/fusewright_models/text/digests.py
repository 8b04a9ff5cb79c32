"""Digests of files, which are remembered, so that those that have not changed are read once.

A file is the same one while its size, its times of change, its number in the file system and that
system's are: what a program stores through a mapping of a file may change none of them. Processes
that ask at the same time wait for the first, and find what it remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from ..training.files import make_folder, write

# A file may change once more within what its file system takes for the same time, some for seconds:
# one that has just changed is not remembered.
SETTLED = 2.5 * 10**9

Stamp = list[int]


def content_digest(file: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def remembered_digests(files: Sequence[Path], root: Path, cache: Path) -> list[str]:
    """`content_digest` of each file; only those that are new or have changed are read.

    Args:
        files: in any number, in an order of the caller's.
        root: their folder, or the one file.
        cache: folder of what is remembered.

    Raises:
        OSError: a file cannot be read, or the folder not be written.
    """
    place = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=16).hexdigest()
    memory = cache / f"{place}.digests"
    make_folder(cache)
    with FileLock(f"{memory}.lock"):
        before = recalled(memory)
        after: dict[str, tuple[Stamp, str]] = {}
        found = []
        for file in files:
            name = file.relative_to(root).as_posix()
            begun, stamp = time.time_ns(), stamp_of(file)
            then, digest = before.get(name, (None, ""))
            if then != stamp:
                digest = content_digest(file)
            if begun - max(stamp[1:3]) > SETTLED:
                after[name] = stamp, digest
            found.append(digest)
        if after != before:
            write(memory, json.dumps(after).encode())
    return found


def stamp_of(file: Path) -> Stamp:
    """What changes where a file does."""
    told = os.stat(file)
    return [told.st_size, told.st_mtime_ns, told.st_ctime_ns, told.st_ino, told.st_dev]


def recalled(memory: Path) -> dict[str, tuple[Stamp, str]]:
    """What is remembered; nothing, where that cannot be read."""
    try:
        told = json.loads(memory.read_bytes())
        return {name: (list(stamp), str(digest)) for name, (stamp, digest) in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
