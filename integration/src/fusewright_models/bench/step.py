"""One training step under the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STAGES = ("data", "fwd", "bwd", "optimizer")
FEWEST_STEPS, MOST_STEPS = 3, 30
LONG_STEPS = 2


class Time(NamedTuple):
    """Milliseconds: median, 20th and 80th percentile."""

    ms: float
    ms_p20: float
    ms_p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Time:
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), fifths[0], fifths[3])


class Measurement(NamedTuple):
    """What one provider took at one shape.

    Attributes:
        loss: of the first batch, with the first weights.
        attention: whose it was, in words.
        stages: times of data, forward pass, backward pass and optimizer.
        step: wall time of the whole, the device waited for.
        steps: how many were timed.
        memory_mib: the peak of a step, weights and optimizer included; None on the CPU.
    """

    loss: float
    attention: str
    stages: dict[str, Time]
    step: Time
    steps: int
    memory_mib: float | None


class Taken(NamedTuple):
    """One step: wall time and stages in milliseconds, and its loss."""

    wall: float
    stages: list[float]
    loss: float


class Source(Protocol):
    """What makes the data of a step, where the model is."""

    device: torch.device

    def sample(self, batch: int, /) -> Any: ...


class Marks(Protocol):
    """What is told where a stage ends."""

    def mark(self) -> None: ...


class Clock:
    """Marks between the stages of a step: events on a CUDA device, the host's clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Events, or seconds.
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            # Without a stream, that of the current device, which need not be this one.
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def between(self) -> list[float]:
        """Milliseconds from each mark to the next; the device must have come to the last."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [
            start.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - start)
            for start, end in pairs
        ]


class Step:
    """Data, forward pass under bf16 autocast, backward pass, optimizer.

    Args:
        model: on the device that is measured.
        sampler: makes the data there.
        batch: tasks of a step.
        loss_function: ``(model, data)`` to the loss.
        optimizer: over the model's parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        sampler: Source,
        batch: int,
        loss_function: Callable[[Any, Any], Tensor],
        optimizer: Optimizer,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.batch = batch
        self.loss_function = loss_function
        self.optimizer = optimizer
        self.device = sampler.device

    def run(self, clock: Marks) -> Tensor:
        """Take the step, with a mark before, between and after the stages; returns the loss."""
        clock.mark()
        data = self.sampler.sample(self.batch)
        clock.mark()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss_function(self.model, data)
        clock.mark()
        loss.backward()
        clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.mark()
        return loss.detach()

    def timed(self) -> Taken:
        """Take the step, the device waited for before and after it."""
        self._synchronize()
        start = time.perf_counter()
        clock = Clock(self.device)
        loss = self.run(clock)
        self._synchronize()
        return Taken(1e3 * (time.perf_counter() - start), clock.between(), float(loss))

    def measure(self, seconds: float, loss: float, attention: str) -> Measurement:
        """Time as many steps as take about ``seconds``, from 3 to 30; a first one has been taken.

        Where a step takes longer than ``seconds``, two are timed; otherwise one more is no part.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        samples = [self.timed()]
        wanted = LONG_STEPS
        if (wall := samples[0].wall / 1e3) < seconds:
            samples.clear()
            wanted = max(FEWEST_STEPS, min(MOST_STEPS, round(seconds / wall)))
        while len(samples) < wanted:
            samples.append(self.timed())
        by_stage = zip(*(taken.stages for taken in samples), strict=True)
        return Measurement(
            loss,
            attention,
            {name: Time.of(ms) for name, ms in zip(STAGES, by_stage, strict=True)},
            Time.of([taken.wall for taken in samples]),
            len(samples),
            self._peak_mib(),
        )

    def _peak_mib(self) -> float | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**20

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
