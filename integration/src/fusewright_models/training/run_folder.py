"""The folder that a training run leaves behind.

config.json      what was asked for
metrics.jsonl    one JSON object per line, each with "step": training lines and evaluation lines
loss.png         the training loss and the evaluations
report.html      one page of all that is told of the run
checkpoints/     everything that the next step depends on, of the last few times it was saved
run.lock         locked while a program trains
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from matplotlib.figure import Figure

from .checkpoints import FOLDER, SINGLE, Checkpoints
from .files import make_folder, sync_file, write, writing

CONFIG, METRICS, LOCK = "config.json", "metrics.jsonl", "run.lock"
# Of a torn line so many bytes are shown.
MOST_SHOWN = 80


class RunFolder:
    """Writes and reads one run's files.

    Whatever stops the program or the machine, each file is whole or as it was before, but for the
    end of the metrics.

    Args:
        path: the folder; it is made with the first file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file, self.metrics_file = self.path / CONFIG, self.path / METRICS
        self.checkpoints = Checkpoints(self.path)

    @property
    def holds_a_run(self) -> bool:
        return self.config_file.exists()

    @property
    def left_over(self) -> list[str]:
        """What a run has left there whose config is gone."""
        names = () if self.holds_a_run else (METRICS, FOLDER, SINGLE)
        return [name for name in names if (self.path / name).exists()]

    @property
    def holds_a_checkpoint(self) -> bool:
        return bool(self.checkpoints.files())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For the program that trains into it, one at a time.

        Raises:
            RuntimeError: another holds it.
            NotWritten: the folder or its lock cannot be made.
        """
        make_folder(self.path)
        file = self.path / LOCK
        lock = FileLock(file)
        with writing(file):
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise RuntimeError(
                    f"wanted a folder that no other program trains into; one holds {file}"
                ) from error
            except NotImplementedError:
                # Some file systems of clusters have no locks, and runs of their own.
                told = f"{file} cannot be locked, and another program not kept out"
                warnings.warn(told, stacklevel=4)
        try:
            yield
        finally:
            lock.release()

    def write(self, name: str, content: bytes) -> None:
        """One more file.

        Raises:
            NotWritten: the disk is full, for instance; the file is as it was.
        """
        write(self.path / name, content)

    def draw(self, name: str, figure: Figure) -> None:
        """Likewise a picture."""
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120)
        self.write(name, drawn.getvalue())

    def write_config(self, config: dict[str, Any]) -> None:
        self.write(CONFIG, (json.dumps(config, indent=2) + "\n").encode())

    def read_config(self) -> dict[str, Any]:
        """What ``write_config`` wrote.

        Raises:
            FileNotFoundError: the folder holds no run.
            ValueError: the file is not a JSON object.
        """
        if not self.holds_a_run:
            raise FileNotFoundError(f"wanted the folder of a run with {CONFIG}; got {self.path}")
        try:
            return _json_object(self.config_file.read_bytes(), str(self.config_file))
        except ValueError as error:
            raise ValueError(
                f"{error}; restore it from a copy, or begin the run again in another folder"
            ) from error

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Raises:
        NotWritten: the disk is full, for instance; the line may be torn.
        """
        make_folder(self.path)
        with writing(self.metrics_file), self.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """What ``append_metrics`` wrote, line by line, but for a torn end.

        Raises:
            ValueError: a line is not a JSON object with the number of a step.
        """
        return self._metrics()[0]

    def _metrics(self) -> tuple[list[dict[str, Any]], bytes]:
        """The lines, and the end where it is no JSON object: what a program that was killed had
        written of its last line, or what a machine that lost power has in place of it.
        """
        file = self.metrics_file
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        read: list[dict[str, Any]] = []
        torn: list[bytes] = []
        reason: ValueError | None = None
        for number, line in enumerate(lines, 1):
            where = f"line {number} of {file}"
            try:
                found = _json_object(line, where)
            except ValueError as error:
                torn.append(line)
                reason = reason or error
                continue
            if reason is not None:
                # What follows it was written after it.
                raise reason
            if type(found.get("step")) is not int:
                got = f"step {found['step']!r}" if "step" in found else "none"
                raise ValueError(f"wanted the number of a step in {where}; got {got}")
            read.append(found)
        return read, b"".join(torn)

    def forget_metrics(
        self, after: int = -1, say: Callable[[str], object] = warnings.warn
    ) -> list[dict[str, Any]]:
        """Drop the lines of steps past ``after``, which a resumed run will take again, and a torn
        end, of which ``say`` is told; returns those that are kept.
        """
        lines, torn = self._metrics()
        kept = [line for line in lines if line["step"] <= after]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        if not (self.metrics_file.exists() and self.metrics_file.read_bytes() == text):
            self.write(METRICS, text)
        if torn:
            shown = repr(torn[:MOST_SHOWN])
            more = f" and {len(torn) - MOST_SHOWN} more bytes" if len(torn) > MOST_SHOWN else ""
            say(f"dropped the last line of {self.metrics_file}, torn: {shown}{more}")
        return kept

    def save_checkpoint(self, state: dict[str, Any], *, keep: int = 1) -> None:
        """Add a checkpoint of ``state["step"]``, whose metrics are on the disk before it, then drop
        all but the newest ``keep``.

        Raises:
            NotWritten: the disk is full, for instance; the others stand.
        """
        if self.metrics_file.exists():
            sync_file(self.metrics_file)
        self.checkpoints.save(state, keep=keep)

    def load_checkpoint(self) -> dict[str, Any]:
        """The newest that is not damaged, on the host.

        Raises:
            FileNotFoundError: the folder holds no checkpoint.
            ValueError: none can be read as one.
        """
        return self.checkpoints.load()[0]


def is_of_training(line: dict[str, Any]) -> bool:
    """Whether a line of metrics is a training's, which has a rate; others are of evaluations."""
    return "lr" in line


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"wanted a JSON object in {where}; got no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"wanted a JSON object in {where}; got a {type(found).__name__}")
    return found
