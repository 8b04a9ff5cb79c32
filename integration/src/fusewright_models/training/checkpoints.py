"""The checkpoints of a run: a folder each, complete or absent, whose manifest has the digest of
what is in it.

checkpoints/step-000120/state.pt         everything that the next step depends on
checkpoints/step-000120/manifest.json    the size and the SHA-256 of state.pt

A run of before has one checkpoint.pt instead, which counts as older than all of these.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from .files import PARTIAL, make_folder, sync_folder, write, writing

FOLDER, STATE, MANIFEST, SINGLE = "checkpoints", "state.pt", "manifest.json", "checkpoint.pt"
COMPLETE = re.compile(r"step-([0-9]+)")
DAMAGED, OLD = ".damaged", f".old{PARTIAL}"


class Checkpoints:
    """Writes and reads the checkpoints of one run.

    Args:
        run: the folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.path, self.single = run, run / FOLDER, run / SINGLE

    def files(self) -> list[Path]:
        """The state of each, newest first."""
        names = [each.name for each in self.path.iterdir()] if self.path.is_dir() else []
        found = {int(match[1]): name for name in names if (match := COMPLETE.fullmatch(name))}
        files = [self.path / found[step] / STATE for step in sorted(found, reverse=True)]
        return [*files, self.single] if self.single.exists() else files

    def save(self, state: dict[str, Any], *, keep: int) -> None:
        """Add a checkpoint of ``state["step"]``, then drop all but the newest ``keep``.

        Raises:
            NotWritten: the disk is full, for instance; the others stand.
        """
        folder = self.path / f"step-{state['step']:06d}"
        partial = folder.with_name(folder.name + PARTIAL)
        make_folder(self.path)
        self.restore()
        self._clean()
        try:
            with writing(folder / STATE):
                partial.mkdir()
                size, digest = _write_state(partial / STATE, state)
            with writing(folder / MANIFEST):
                manifest = {"step": state["step"], "bytes": size, "sha256": digest}
                write(partial / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
            with writing(folder):
                self._drop(folder)
                os.rename(partial, folder)
                sync_folder(self.path)
        except BaseException:
            # It would keep a full disk full.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for file in self.files()[keep:]:
            if file == self.single:
                file.unlink()
            else:
                self._drop(file.parent)
        self._clean()

    def load(self, say: Callable[[str], object] = warnings.warn) -> tuple[dict[str, Any], Path]:
        """The newest state that is not damaged, on the host, and its file. Nothing that a file says
        is executed.

        Args:
            say: is told of each newer one that is damaged.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: none can be read as one.
        """
        damaged: list[Damaged] = []
        for file in self.files():
            try:
                state = _read(file)
            except Damaged as error:
                damaged.append(error)
                continue
            for each in damaged:
                say(f"{each}; {file} is taken instead")
            return state, file
        if damaged:
            raise damaged[0]
        raise FileNotFoundError(f"wanted the folder of a run with a checkpoint; got {self.run}")

    def set_aside(self, after: int) -> None:
        """Rename those of steps past ``after``, which a resumed run will take again."""
        for file in self.files():
            if file != self.single and _step(file) > after:
                aside = file.parent.with_name(file.parent.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(file.parent, aside)
                sync_folder(self.path)

    def restore(self) -> None:
        """Give a checkpoint its name again that a program was killed over replacing by another of
        the same step; for the program that holds the folder.
        """
        for each in self.path.glob(f"*{OLD}"):
            folder = each.with_name(each.name.removesuffix(OLD))
            if not folder.exists():
                os.rename(each, folder)

    def identity(self, file: Path) -> str:
        """What tells a state's file from those of other steps and runs."""
        if file == self.single:
            return f"{file.name} of {file.stat().st_size} bytes"
        return f"{file.parent.name}, {json.loads(file.with_name(MANIFEST).read_bytes())['sha256']}"

    def _drop(self, folder: Path) -> None:
        """First its name, for it to be absent or complete."""
        if folder.exists():
            os.rename(folder, folder.with_name(folder.name + OLD))

    def _clean(self) -> None:
        """Away with what a program that was killed was writing or removing."""
        for each in self.path.glob(f"*{PARTIAL}"):
            shutil.rmtree(each, ignore_errors=True)


class _Digested:
    """A file that ``torch.save`` writes from its beginning to its end, and the digest of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _write_state(path: Path, state: dict[str, Any]) -> tuple[int, str]:
    """Returns size and digest."""
    with path.open("wb") as file:
        digested = _Digested(file)
        try:
            torch.save(state, cast(BinaryIO, digested))
        except Exception:
            # torch hides it behind an error of its own.
            if digested.error is not None:
                raise digested.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return digested.size, digested.digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Raises:
    Damaged: it is not what was written, or no checkpoint.
    ValueError: it is, and cannot be loaded here.
    """
    wanted = f"wanted a checkpoint of a run in {path}; got"
    try:
        with path.open("rb") as file:
            if path.name == STATE:
                _check_digest(path, file)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # Memory and permissions are no damage.
        unread = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EIO)
        if isinstance(error, (OSError, MemoryError)) and not unread:
            raise
        # A damaged file raises anything, and torch's advice is for files of strangers.
        told = f": {error}" if isinstance(error, (OSError, _Differs)) else ""
        if path.name == STATE and not told and not isinstance(error, pickle.UnpicklingError):
            # The digest is right: it lacks memory, for instance.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{wanted} one that cannot be loaded: {reason}") from error
        raise Damaged(f"{wanted} a damaged file{told}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{wanted} a saved {type(state).__name__}")
    return state


class Damaged(ValueError):
    """A checkpoint is not what was written, or none."""


class _Differs(ValueError):
    """A file is not the one of its manifest."""


def _check_digest(path: Path, file: BufferedReader) -> None:
    manifest_file = path.with_name(MANIFEST)
    try:
        manifest = json.loads(manifest_file.read_bytes())
        wanted = manifest["step"], manifest["bytes"], manifest["sha256"]
    except (ValueError, LookupError, TypeError) as error:
        raise _Differs(f"{manifest_file} has no digest of it") from error
    size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256")
    file.seek(0)
    got = _step(path), size, digest.hexdigest()
    for name, found, told in zip(("step", "size", "SHA-256"), got, wanted, strict=True):
        if found != told:
            raise _Differs(f"its {name} is {found}, that of {MANIFEST} {told}")


def _step(path: Path) -> int:
    """Of a state's file."""
    match = COMPLETE.fullmatch(path.parent.name)
    assert match is not None
    return int(match[1])


def on_host(state: Any, copied: dict[int, torch.UntypedStorage] | None = None) -> Any:
    """A copy of a state on the host, which training does not change; memory that tensors share they
    share in the copy.
    """
    copied = {} if copied is None else copied
    if isinstance(state, Tensor):
        storage = state.untyped_storage()
        if storage._cdata not in copied:
            on_cpu = storage.device.type == "cpu"
            copied[storage._cdata] = storage.clone() if on_cpu else storage.cpu()
        alike = torch.empty(0, dtype=state.dtype)
        return alike.set_(
            copied[storage._cdata], state.storage_offset(), state.shape, state.stride()
        )
    if isinstance(state, dict):
        # With the attributes that a module's state dict has.
        found = copy.copy(state)
        found.update({name: on_host(value, copied) for name, value in state.items()})
        return found
    if isinstance(state, (list, tuple)):
        return type(state)(on_host(value, copied) for value in state)
    return state
