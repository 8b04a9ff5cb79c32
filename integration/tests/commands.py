"""Commands as the tests run them, and what they leave."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from fusewright_models.bench.__main__ import app as bench
from fusewright_models.cli import commands, text, transformer_np
from fusewright_models.training import RunFolder, trainer
from matplotlib.figure import Figure
from typer.testing import CliRunner

# In lines of metrics, of the machine and the moment.
MEASURED = {
    "tokens_per_second",
    "padded_tokens_per_second",
    "seconds",
    "evaluation_seconds",
    "evaluation_share",
    "mfu",
    "peak_memory_mib",
}
# Of a language model; `draw` has its own.
FILES = {"config.json", "metrics.jsonl", "loss.png", "sample.txt", "report.html"}
FILES |= {"checkpoints", "run.lock"}


def invoke(program: typer.Typer | Callable[..., None], *arguments: object) -> Result:
    """A program, or a function that is one command; no message is broken into lines."""
    if not isinstance(program, typer.Typer):
        command, program = program, typer.Typer()
        program.command()(command)
    environment = {"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1"}
    return CliRunner().invoke(program, [*map(str, arguments)], env=environment)


def bench_of(model: str, *arguments: object, device: str = "cpu", shape: str = "1,20") -> Result:
    """Of the smallest preset of a language model."""
    sizes = ["--preset", "tiny", "--seconds", "0", "--shape", shape]
    return invoke(bench, model, *sizes, "--device", device, *arguments)


def train_at(patch: pytest.MonkeyPatch, rate: float) -> None:
    """A rate that no flag may ask for, so that runs diverge at once."""
    make = commands.make_optimizer
    patch.setattr(
        commands, "make_optimizer", lambda *given, **asked: make(*given, **asked | {"lr": rate})
    )


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """A picture takes longer than the training of a tiny model."""
    patch.setattr(trainer, "plot_loss", lambda folder: None)
    for module in (text, transformer_np):
        patch.setattr(module, "write_report", lambda folder: None)
    patch.setattr(transformer_np, "draw_predictions", lambda *given: Figure())


def assert_refused(result: Result, message: str, folder: Path | None = None) -> None:
    """In a sentence that has this pattern, and with nothing in the folder."""
    assert result.exit_code == 2
    assert re.search(message, result.output)
    assert "Traceback" not in result.output
    assert folder is None or not folder.exists() or list(folder.iterdir()) == []


def flags_of(value: object) -> str:
    """The id of a test with some flags; that of their message is left out."""
    return "-".join(value).replace("--", "") if isinstance(value, list) else ""


def rows_of(folder: Path, pattern: str = "*.csv") -> list[dict[str, str]]:
    """Of the one result file."""
    (path,) = folder.glob(pattern)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RunFolder(folder).load_checkpoint()["model"]


def state_file(folder: Path) -> Path:
    """Of the newest checkpoint."""
    return RunFolder(folder).checkpoints.files()[0]


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def untimed_metrics(folder: Path) -> list[dict]:
    return [{name: line[name] for name in line if name not in MEASURED} for line in metrics(folder)]


def assert_same_metrics(one: Path, other: Path) -> None:
    """But for what is measured."""
    assert untimed_metrics(one) == untimed_metrics(other)


def written_text(folder: Path, lines: int = 400) -> Path:
    """A file of text, 6 KB of 400 lines."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {number} of {number * number}\n" for number in range(lines)))
    return path


def interrupted(monkeypatch: pytest.MonkeyPatch, kind: type, calls: int, run: Callable) -> Result:
    """What comes of a run that is stopped by its user at the so-manieth batch of such a source."""
    sample, seen = kind.sample, []

    def stopping(self, batch):
        seen.append(batch)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return sample(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "sample", stopping)
        return run()
