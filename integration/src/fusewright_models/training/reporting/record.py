"""What a run tells while it trains: lines of metrics, sentences and a bar."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...devices import peak_memory, peak_tflops
from ..processes import Processes
from ..run_folder import RunFolder
from ..stepper import Means
from .loggers import Observer

# A loss that overflows now and then is no end of a run.
MOST_SKIPPED = 10
NOT_FINITE = "not finite; lower the learning rate or look at the data"


class Record:
    """Writes what the first of some processes tells.

    Args:
        folder: where lines of metrics go; None keeps nothing.
        console: where sentences and the bar go.
        processes: of which the first one writes.

    Attributes:
        observers: are shown every line of metrics as it is written.
        noted: the step of the last line.
    """

    def __init__(self, folder: RunFolder | None, console: Console, processes: Processes) -> None:
        self.folder, self.console, self.processes = folder, console, processes
        self.observers: list[Observer] = []
        self.noted: int | None = None

    def say(self, text: str) -> None:
        # Paths may have brackets and colons in them.
        self.console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def note(self, step: int, numbers: dict[str, float]) -> dict[str, float]:
        """Write a line, and return it.

        Raises:
            FloatingPointError: a number is not finite.
            NotWritten: the line could not be written.
        """
        line = {"step": step, **numbers}
        wrong = [f"{readable(name)} {x}" for name, x in numbers.items() if not math.isfinite(x)]
        if wrong:
            raise FloatingPointError(f"{' and '.join(wrong)} at step {step}: {NOT_FINITE}")
        if self.folder is not None:
            if self.processes.is_main:
                self.folder.append_metrics(line)
            self.noted = step
        for observe in self.observers:
            observe(line)
        return line

    def bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self.console,
        )


class Clock:
    """Times the steps since the last log point: evaluations and pauses are no part of them.

    Attributes:
        tokens: of these steps.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.tokens = 0
        self.begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.begun += time.perf_counter() - before


class Spent:
    """Seconds of a run, those before it was stopped and resumed too, by its lines of metrics.

    Attributes:
        training: of steps.
        evaluating: of evaluations.
    """

    def __init__(self) -> None:
        self.training = self.evaluating = 0.0

    def look(self, line: Mapping[str, float]) -> None:
        self.training += line.get("seconds", 0.0)
        self.evaluating += line.get("evaluation_seconds", 0.0)

    @property
    def share(self) -> float:
        """Of evaluations; NaN of nothing."""
        whole = self.training + self.evaluating
        return self.evaluating / whole if whole else math.nan


def check_means(means: Means, steps: range) -> None:
    """Refuse to go on from steps that came to nothing.

    Args:
        means: since the last log point.
        steps: taken since then.

    Raises:
        FloatingPointError: ten and more steps in a row were skipped, or what was taken is not
            finite.
    """
    if means.skipped_in_a_row >= MOST_SKIPPED:
        raise FloatingPointError(
            f"the last {means.skipped_in_a_row} steps up to {steps[-1]} were skipped in a row, "
            "for losses or gradients that are not finite; lower the learning rate or look at "
            f"the data{counted(means)}"
        )
    loss, norm = means.loss, means.gradient_norm
    if means.taken and not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(
            f"loss {loss} and gradient norm {norm} on average over steps {steps[0]} to "
            f"{steps[-1]}: {NOT_FINITE}{counted(means)}"
        )


class Speed(NamedTuple):
    """What is told of the speed of a training and of its memory.

    Attributes:
        device: that trains, or one of those that do.
        devices: how many do.
        operations: of a token's share of a step; None where they are not known.
    """

    device: torch.device
    devices: int = 1
    operations: float | None = None

    def numbers(self, tokens: int, padding: int, seconds: float) -> dict[str, float]:
        """By name, of so many tokens in so many seconds, those of padding included."""
        rate = (tokens - padding) / seconds
        found = {"tokens_per_second": rate, "seconds": seconds}
        if padding:
            found["padded_tokens_per_second"] = padding / seconds
        peak = None if self.operations is None else peak_tflops(self.device)
        if self.operations is not None and peak is not None:
            found["mfu"] = rate * self.operations / (peak * 1e12 * self.devices)
        most = peak_memory(self.device)
        return found if most is None else found | {"peak_memory_mib": most / 2**20}


def training_line(means: Means, rate: float, speed: dict[str, float]) -> dict[str, float]:
    """The line of a log point.

    Args:
        means: since the last one.
        rate: of the last step.
        speed: numbers of it, by name.
    """
    line: dict[str, float] = {}
    if means.taken:
        line |= {"loss": means.loss, **means.means, "gradient_norm": means.gradient_norm}
    line |= {"lr": rate, **speed}
    if means.skipped:
        line["skipped_steps"] = means.skipped
    return line | {name: int(count) for name, count in means.counts.items() if count}


def state_of(means: Means, line: dict[str, float]) -> str:
    """Of a training, beside its bar."""
    told = f"loss {means.loss:.4f}" if means.taken else "all skipped"
    parts = [told, f"{line['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in line:
        parts.append(f"{line['mfu']:.1%} MFU")
    if "peak_memory_mib" in line:
        parts.append(f"{line['peak_memory_mib'] / 2**10:.1f} GiB")
    return "  ".join(parts) + counted(means)


def counted(means: Means) -> str:
    """What was counted, at the end of a sentence."""
    counts = means.counts.items()
    return "".join(f"; {int(count)} {readable(name)}" for name, count in counts if count)


def shown(numbers: dict[str, float]) -> str:
    """Of an evaluation."""
    each = ((name, f"{x:,}" if isinstance(x, int) else f"{x:.4f}") for name, x in numbers.items())
    return ", ".join(f"{readable(name)} {number}" for name, number in each)


def readable(name: str) -> str:
    return name.replace("_", " ")
