"""Training steps of language models: eager, replayed from a CUDA graph, and of their peers.

A step is forward pass and loss under bf16 autocast over fp32 weights, backward pass and torch's
fused AdamW, on tokens that lie on the device.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..training.captured import uncollected
from .harness import SEED, Expected, Failure, attempt
from .results import COLUMNS, Row, merge
from .step import Measurement, Step, Taken, Time

# Before a graph is captured, everything has been compiled, tuned and allocated once.
WARM_UP_STEPS = 3


class TextShape(NamedTuple):
    """B rows of T tokens, of each of which the next one is predicted."""

    batch: int
    length: int

    @classmethod
    def parse(cls, text: str) -> TextShape:
        """Read "4,4096"."""
        try:
            shape = cls(*map(int, text.split(",")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a shape is B,T such as 4,4096; got {text!r}") from error
        if min(shape) < 1:
            raise ValueError(f"B and T must be at least 1; got {text!r}")
        return shape

    def case(self, config: Any) -> str:
        return f"dim={config.dim} layers={config.layers} B={self.batch} T={self.length}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length


class Text:
    """The same random tokens for every step: ``[B, T + 1]``."""

    def __init__(self, vocab_size: int, length: int, device: torch.device) -> None:
        self.device = device
        self.drawn = (vocab_size, length)
        self.tokens: dict[int, Tensor] = {}

    def sample(self, batch: int) -> Tensor:
        if batch not in self.tokens:
            vocab_size, length = self.drawn
            generator = torch.Generator().manual_seed(SEED)
            drawn = torch.randint(vocab_size, (batch, length + 1), generator=generator)
            self.tokens[batch] = drawn.to(self.device)
        return self.tokens[batch]


class Unclocked:
    """No marks: a graph that is captured has no times inside."""

    def mark(self) -> None:
        pass


class Replayed:
    """A step captured in a CUDA graph, all of it: one launch, nothing of Python in between."""

    def __init__(self, step: Step) -> None:
        for group in step.optimizer.param_groups:
            group["capturable"] = True
        stream = torch.cuda.Stream(step.device)
        stream.wait_stream(torch.cuda.current_stream(step.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step.run(Unclocked())
        torch.cuda.current_stream(step.device).wait_stream(stream)
        torch.cuda.synchronize(step.device)
        self.device = step.device
        self.graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(self.graph, stream=stream):
            self.loss = step.run(Unclocked())

    def timed(self) -> Taken:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize(self.device)
        return Taken(start.elapsed_time(end), [], float(self.loss))


@dataclass(frozen=True)
class TextHarness(ABC):
    """What all measurements of a model have in common.

    Attributes:
        config: the shape of the model.
        device: where everything is.
        seconds: about how long the steps of one provider are timed.
        check: hold the first loss of ours against one in fp32.
        file: the result file; None keeps nothing.
        console: where the tables go.
    """

    op: ClassVar[str]

    config: Any
    device: torch.device
    seconds: float
    check: bool
    file: Path | None
    console: Console

    @abstractmethod
    def step(self, shape: TextShape, provider: Any) -> Step:
        """One training step of a new model, the same weights for all of ours."""

    @abstractmethod
    def expected(self, shape: TextShape) -> Expected:
        """The first loss, and how far from it one of ours in bf16 may be."""

    @abstractmethod
    def row_name(self, provider: Any) -> str:
        """The provider with what is not in the case."""

    def is_ours(self, provider: Any) -> bool:
        return provider.startswith("fusewright")

    def title(self, shape: TextShape) -> str:
        return shape.case(self.config)

    def bench(self, shape: TextShape, providers: list[Any]) -> bool:
        """Measure one shape, print its table, keep its rows; False where ours failed."""
        table = empty_table(self.title(shape))
        good = True
        expected = self.expected(shape) if self.check else None
        for provider in providers:
            for timing in self.timings(provider):
                measured = attempt(self.measure, shape, provider, timing, expected)
                self.let_go()
                name = self.row_name(provider)
                if isinstance(measured, Failure):
                    good &= not self.is_ours(provider)
                    table.add_row(name, timing, measured.reason)
                    continue
                add(table, shape, name, timing, measured)
                if self.file is not None:
                    merge(self.file, [row(self.op, self.config, shape, name, timing, measured)])
        self.console.print(table)
        return good

    def timings(self, provider: Any) -> tuple[str, ...]:
        """A graph is captured on a GPU, and of ours: a peer may wait for the device."""
        graph = self.device.type == "cuda" and self.is_ours(provider)
        return ("wall", "graph") if graph else ("wall",)

    def measure(
        self, shape: TextShape, provider: Any, timing: str, expected: Expected | None
    ) -> Measurement:
        """Check the first loss of ours, then take the time.

        Raises:
            ArithmeticError: the loss of ours is not the expected one.
        """
        step = self.step(shape, provider)
        loss = step.timed().loss
        complaint = expected.complaint(loss) if expected and self.is_ours(provider) else None
        if complaint:
            raise ArithmeticError(complaint)
        if timing == "wall":
            return step.measure(self.seconds, loss, "")
        torch.cuda.reset_peak_memory_stats(self.device)
        replayed = Replayed(step)
        first = replayed.timed()
        wanted = max(10, min(100, round(1e3 * self.seconds / first.wall)))
        walls = [replayed.timed().wall for _ in range(wanted)]
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        return Measurement(loss, "", {}, Time.of(walls), wanted, peak)

    def let_go(self) -> None:
        """What a call held is let go, that nothing of it counts next."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def row(
    op: str, config: Any, shape: TextShape, provider: str, timing: str, measured: Measurement
) -> Row:
    """The step as a row of a result file."""
    values = [
        *(op, shape.case(config), "step", provider, "bf16", timing),
        *(f"{ms:.4f}" for ms in measured.step),
        *("", ""),
        "" if measured.memory_mib is None else f"{measured.memory_mib:.1f}",
    ]
    return dict(zip(COLUMNS, values, strict=True))


def empty_table(title: str) -> Table:
    table = Table(title=title, caption="milliseconds of a step")
    table.add_column("provider")
    table.add_column("timing")
    for name in ("tokens/s", "step", "p20", "p80", "GiB", "steps", "loss"):
        table.add_column(name, justify="right")
    return table


def add(table: Table, shape: TextShape, provider: str, timing: str, measured: Measurement) -> None:
    """A line of the table."""
    memory = measured.memory_mib
    table.add_row(
        provider,
        timing,
        f"{1e3 * shape.tokens / measured.step.ms:,.0f}",
        *(f"{ms:,.2f}" for ms in measured.step),
        "" if memory is None else f"{memory / 1024:.2f}",
        str(measured.steps),
        f"{measured.loss:.5f}",
    )
