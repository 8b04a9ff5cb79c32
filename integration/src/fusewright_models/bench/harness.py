"""Measures every provider at a shape, on the same weights and the same data."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from .results import Row, merge, table_of
from .step import Measurement, Step

SEED = 0
FACTOR, ULPS = 2, 2
Found = TypeVar("Found")


class Expected(NamedTuple):
    """The loss of the first batch in fp32, and how far from it one in bf16 may be."""

    loss: float
    allowed: float

    @classmethod
    def of(cls, loss: float, error: float) -> Expected:
        """Twice what eager torch errs by, and two units in the last place."""
        return cls(loss, FACTOR * error + ULPS * torch.finfo(torch.float32).eps * abs(loss))

    def complaint(self, loss: float) -> str | None:
        """What is wrong with a provider's loss; None where nothing is."""
        if abs(loss - self.loss) <= self.allowed:
            return None
        return f"loss {loss:.6f} is not within {self.allowed:.1e} of {self.loss:.6f}"


class Absent(Exception):
    """What a measurement needs is not here."""


class Failure(NamedTuple):
    """Why there is no result, in one line; ``absent`` where what it needs is not here."""

    reason: str
    absent: bool = False


class Line(NamedTuple):
    """One line of a table.

    Attributes:
        names: in its first columns.
        needed: whether the command fails where this does.
        measure: what takes the time, or another measurement.
        told: what was measured, for the other columns; it keeps the rows of the result file.
        failed: is told why there is nothing.
    """

    names: tuple[str, ...]
    needed: bool
    measure: Callable[[], Any]
    told: Callable[[Any], Iterable[str]]
    failed: Callable[[str], None] = lambda reason: None


@dataclass(frozen=True)
class Harness(ABC):
    """What all measurements of a model have in common.

    Attributes:
        op: the model, for a result file.
        caption: of a table, whose ``columns`` follow those of provider and ``second``.
        config: the shape of the model.
        device: where everything is.
        seconds: about how long the steps of one provider are timed.
        check: hold the first loss against one in fp32.
        file: the result file; None keeps nothing.
        console: where the tables go.
    """

    op: ClassVar[str]
    caption: ClassVar[str]
    second: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    config: Any
    device: torch.device
    seconds: float
    check: bool
    file: Path | None
    console: Console

    @abstractmethod
    def step(self, shape: Any, provider: Any) -> Step:
        """One training step of a new model, the same weights for all of ours."""

    @abstractmethod
    def expected(self, shape: Any) -> Expected:
        """The first loss, and how far from it one in bf16 may be."""

    @abstractmethod
    def measure(
        self, shape: Any, provider: Any, timing: str, expected: Expected | None
    ) -> Measurement:
        """Check the first loss, then take the time.

        Raises:
            ArithmeticError: the loss of ours is not the expected one.
        """

    @abstractmethod
    def line(self, shape: Any, timing: str, measured: Measurement) -> list[str]:
        """What follows the provider in the table."""

    @abstractmethod
    def rows(self, shape: Any, provider: Any, timing: str, measured: Measurement) -> list[Row]:
        """Of the result file."""

    def case(self, shape: Any) -> str:
        return shape.case

    def title(self, shape: Any) -> str:
        return self.case(shape)

    def name(self, provider: Any) -> str:
        """Of the table."""
        return provider.name

    def is_ours(self, provider: Any) -> bool:
        return self.name(provider).startswith("fusewright")

    def timings(self, provider: Any) -> tuple[str, ...]:
        return ("wall",)

    def bench(self, shape: Any, providers: list[Any]) -> bool:
        """Measure one shape, print its table, keep its rows; False where ours failed."""
        expected = self.known(shape)

        def line_of(provider: Any, timing: str) -> Line:
            def told(measured: Measurement) -> list[str]:
                if self.file is not None:
                    merge(self.file, self.rows(shape, provider, timing, measured))
                return self.line(shape, timing, measured)

            names = self.name(provider), *([timing] if self.second == "timing" else [])
            measure = partial(self.measure, shape, provider, timing, expected)
            return Line(names, self.is_ours(provider), measure, told)

        lines = [line_of(each, timing) for each in providers for timing in self.timings(each)]
        named = "provider", self.second
        return self.tabulate(table_of(self.title(shape), self.caption, named, self.columns), lines)

    def known(self, shape: Any) -> Expected | None:
        """`expected`, where losses are held against it and it can be had."""
        found = self.attempt(self.expected, shape) if self.check else None
        if isinstance(found, Failure):
            self.console.print(
                f"{self.title(shape)}: nothing to hold losses against: {found.reason}"
            )
            return None
        return found

    def tabulate(self, table: Table, lines: Iterable[Line]) -> bool:
        """Measure what makes each line of the table and print it; False where a line failed that
        is needed and could run. What fails is a line that says why.
        """
        good = True
        for line in lines:
            found = self.attempt(line.measure)
            if isinstance(found, Failure):
                line.failed(found.reason)
                table.add_row(*line.names, found.reason)
                good &= found.absent or not line.needed
            else:
                table.add_row(*line.names, *line.told(found))
        self.console.print(table)
        return good

    def let_go(self) -> None:
        """What a call held is let go, that nothing of it counts next."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def attempt(self, call: Callable[..., Found], *arguments: Any) -> Found | Failure:
        """What ``call`` returns, or why it did not."""
        found: Found | Failure
        try:
            found = call(*arguments)
        except torch.OutOfMemoryError:
            found = Failure("out of memory")
        except Absent as error:
            found = Failure(f"absent: {error}", absent=True)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            found = Failure(f"{type(error).__name__}: {first_line}")
        # What a failed call held is let go with its traceback.
        self.let_go()
        return found
