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
    def holds_a_checkpoint(self) -> bool:
        return self.checkpoint_file.exists()

    def write_config(self, config: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(json.dumps(config, indent=2) + "\n")

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
        """What ``append_metrics`` wrote, line by line.

        Raises:
            ValueError: a line is not a JSON object.
        """
        file = self.metrics_file
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [_json_object(line, f"line {n} of {file}") for n, line in enumerate(lines, 1)]

    def forget_metrics(self, after: int = -1) -> None:
        """Drop the lines of steps past ``after``, which a resumed run will take again."""
        kept = [line for line in self.read_metrics() if line["step"] <= after]
        self.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in kept))

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
