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

    @property
    def holds_a_run(self) -> bool:
        return (self.path / CONFIG).exists()

    @property
    def holds_a_checkpoint(self) -> bool:
        return (self.path / CHECKPOINT).exists()

    def write_config(self, config: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        """What ``write_config`` wrote.

        Raises:
            FileNotFoundError: the folder holds no run.
        """
        if not self.holds_a_run:
            raise FileNotFoundError(f"wanted the folder of a run with {CONFIG}; got {self.path}")
        return json.loads((self.path / CONFIG).read_text())

    def append_metrics(self, line: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        file = self.path / METRICS
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def forget_metrics(self, after: int = -1) -> None:
        """Drop the lines of steps past ``after``, which a resumed run will take again."""
        kept = [line for line in self.read_metrics() if line["step"] <= after]
        (self.path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; a run that dies in the middle keeps the old one."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        os.replace(partial, self.path / CHECKPOINT)

    def load_checkpoint(self) -> dict[str, Any]:
        """What ``save_checkpoint`` saved, on the host.

        Raises:
            FileNotFoundError: the folder holds no checkpoint.
        """
        if not self.holds_a_checkpoint:
            raise FileNotFoundError(f"wanted a folder with {CHECKPOINT}; got {self.path}")
        return torch.load(self.path / CHECKPOINT, map_location="cpu", weights_only=True)
