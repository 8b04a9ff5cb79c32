"""Files of a run, each of which is there whole or as it was before, whatever stops the program or
the machine: written beside their place, put onto the disk, and renamed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"


class NotWritten(OSError):
    """A file of a run could not be written; what stood in its place stands."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises:
    NotWritten: what is written within cannot be; says what and why.
    """
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        raise NotWritten(f"could not write {path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """With those above it, their names on the disk."""
    if path.is_dir():
        return
    with writing(path):
        if path.parent != path:
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Wait until a file's content and its name are on the disk."""
    with writing(path):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    # Elsewhere folders cannot be opened.
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Make or replace a file.

    Raises:
        NotWritten: the disk is full, for instance; the file is as it was.
    """
    make_folder(path.parent)
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            # It would keep a full disk full.
            partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


class Background:
    """Writes beside the training, one thing at a time."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Once what was begun before is written.

        Raises:
            NotWritten: that could not be written.
        """
        self.wait()
        self.thread = threading.Thread(target=self._run, args=(write,), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Until everything is written.

        Raises:
            NotWritten: it could not be.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Tell of what could not be written, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self.error = error
