"""The folder that a training run leaves behind.

config.json      what was asked for
metrics.jsonl    one JSON object per line, each with "step": training lines and evaluation lines
loss.png         the training loss and the evaluations
checkpoint.pt    everything that the next step depends on
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"


class RunFolder:
    """Writes and reads one run's files.

    Args:
        path: the folder; it is made with the first file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file, self.checkpoint_file = self.path / CONFIG, self.path / CHECKPOINT
        self.metrics_file = self.path / METRICS

    @property
    def holds_a_run(self) -> bool:
        return self.config_file.exists()

    @property
    def left_over(self) -> list[str]:
        """What a run has left there whose config is gone."""
        files = () if self.holds_a_run else (self.metrics_file, self.checkpoint_file)
        return [file.name for file in files if file.exists()]

    @property
    def holds_a_checkpoint(self) -> bool:
        return self.checkpoint_file.exists()

    def write_config(self, config: dict[str, Any]) -> None:
        self._replace(self.config_file, json.dumps(config, indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        """What ``write_config`` wrote.

        Raises:
            FileNotFoundError: the folder holds no run.
            ValueError: the file is not a JSON object.
        """
        if not self.holds_a_run:
            raise FileNotFoundError(f"wanted the folder of a run with {CONFIG}; got {self.path}")
        return _json_object(self.config_file.read_bytes(), str(self.config_file))

    def append_metrics(self, line: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """What ``append_metrics`` wrote, line by line, but for a torn last one.

        Raises:
            ValueError: a line is not a JSON object with the number of a step.
        """
        return self._metrics()[0]

    def torn_metrics(self) -> bytes:
        """The last line where it is no JSON object and has no end: what a program that was killed
        had written of it.
        """
        return self._metrics()[1]

    def _metrics(self) -> tuple[list[dict[str, Any]], bytes]:
        """The lines, and the last one if it is torn."""
        file = self.metrics_file
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        read: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            where = f"line {number} of {file}"
            try:
                found = _json_object(line, where)
            except ValueError:
                # The end of a line is written last.
                if number == len(lines) and not line.endswith(b"\n"):
                    return read, line
                raise
            if type(found.get("step")) is not int:
                got = f"step {found['step']!r}" if "step" in found else "none"
                raise ValueError(f"wanted the number of a step in {where}; got {got}")
            read.append(found)
        return read, b""

    def forget_metrics(self, after: int = -1) -> list[dict[str, Any]]:
        """Drop the lines of steps past ``after``, which a resumed run will take again, and a torn
        last line; returns those that are kept.
        """
        kept = [line for line in self.read_metrics() if line["step"] <= after]
        self._replace(self.metrics_file, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def _replace(self, file: Path, text: str) -> None:
        """A program that is killed here leaves the old text, or none."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(text)
        os.replace(partial, file)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; a run that dies in the middle keeps the old one."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        os.replace(partial, self.checkpoint_file)

    def load_checkpoint(self) -> dict[str, Any]:
        """What ``save_checkpoint`` saved, on the host.

        Raises:
            FileNotFoundError: the folder holds no checkpoint.
            ValueError: the file cannot be read as one.
        """
        if not self.holds_a_checkpoint:
            raise FileNotFoundError(f"wanted a folder with {CHECKPOINT}; got {self.path}")
        try:
            state = torch.load(self.checkpoint_file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            # A damaged file raises anything, and torch's advice is for files of strangers.
            raise ValueError(
                f"wanted a checkpoint of a run in {self.checkpoint_file}; got a damaged file"
            ) from error
        if not isinstance(state, dict):
            raise ValueError(
                f"wanted a checkpoint of a run in {self.checkpoint_file}; "
                f"got a saved {type(state).__name__}"
            )
        return state


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"wanted a JSON object in {where}; got no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"wanted a JSON object in {where}; got a {type(found).__name__}")
    return found
