"""One training step under the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import capturing, wait_for

STAGES = ("data", "fwd", "bwd", "optimizer")
FEWEST_STEPS, MOST_STEPS = 3, 30
LONG_STEPS = 2
FEWEST_REPLAYS, MOST_REPLAYS = 10, 100
# Before a graph is captured, everything has been compiled, tuned and allocated once.
WARM_UP_STEPS = 3


class Time(NamedTuple):
    """Milliseconds: median, 20th and 80th percentile."""

    ms: float
    ms_p20: float
    ms_p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Time:
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), fifths[0], fifths[3])


class Taken(NamedTuple):
    """One step: wall time and stages in milliseconds, and its loss."""

    wall: float
    stages: list[float]
    loss: float


class Measurement(NamedTuple):
    """What one provider took at one shape.

    Attributes:
        loss: of the first batch, with the first weights.
        attention: whose it was, in words.
        stages: times of data, forward pass, backward pass and optimizer; none of a replayed step.
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

    @classmethod
    def of(
        cls, samples: Sequence[Taken], device: torch.device, *, loss: float, attention: str = ""
    ) -> Measurement:
        """Of steps on that device, whose peak is the one since it was last reset."""
        by_stage = zip(*(taken.stages for taken in samples), strict=True)
        stages = {name: Time.of(ms) for name, ms in zip(STAGES, by_stage, strict=False)}
        wall, peak = Time.of([taken.wall for taken in samples]), None
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) / 2**20
        return cls(loss, attention, stages, wall, len(samples), peak)


class Source(Protocol):
    """What makes the data of a step, where the model is."""

    @property
    def device(self) -> torch.device | str: ...

    def sample(self, batch: int, /) -> Any: ...


def no_mark() -> None:
    """Of a step without times inside, such as one that a graph captures."""


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


@dataclass
class Step:
    """Data, forward pass, backward pass, optimizer.

    Attributes:
        model: on the device that is measured.
        sampler: makes the data there.
        batch: tasks of a step.
        loss_function: ``(model, data)`` to the loss.
        optimizer: over the model's parameters.
        reads: whether the host reads each loss.
        autocast: whether the forward pass is under autocast for bf16.
    """

    model: nn.Module
    sampler: Source
    batch: int
    loss_function: Callable[[Any, Any], Tensor]
    optimizer: Optimizer
    reads: bool = False
    autocast: bool = True

    @property
    def device(self) -> torch.device:
        return torch.device(self.sampler.device)

    def run(self, mark: Callable[[], None] = no_mark) -> Tensor:
        """Take the step, with a mark before, between and after the stages; returns the loss."""
        mark()
        data = self.sampler.sample(self.batch)
        mark()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.loss_function(self.model, data)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark()
        if self.reads:
            loss.item()
        return loss.detach()

    def timed(self) -> Taken:
        """Take the step, the device waited for before and after it."""
        wait_for(self.device)
        start = time.perf_counter()
        clock = Clock(self.device)
        loss = self.run(clock.mark)
        wait_for(self.device)
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
        return Measurement.of(samples, self.device, loss=loss, attention=attention)


class Replayed:
    """A step captured in a CUDA graph, all of it: one launch, nothing of Python in between.

    Where the sampler has a generator on the device, the data is drawn within the graph, other data
    at each replay: that which eager steps would draw.
    """

    def __init__(self, step: Step) -> None:
        for group in step.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        stream = torch.cuda.Stream(step.device)
        stream.wait_stream(torch.cuda.current_stream(step.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step.run()
        torch.cuda.current_stream(step.device).wait_stream(stream)
        torch.cuda.synchronize(step.device)
        self.device = step.device
        self.graph = torch.cuda.CUDAGraph()
        generator = getattr(step.sampler, "generator", None)
        if generator is not None:
            self.graph.register_generator_state(generator)
        with capturing(self.graph, step.device, stream=stream):
            self.loss = step.run()

    def timed(self) -> Taken:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize(self.device)
        return Taken(start.elapsed_time(end), [], float(self.loss))

    @classmethod
    def measured(cls, step: Step, seconds: float, loss: float, attention: str) -> Measurement:
        """Time as many replays as take about ``seconds``, from 10 to 100; two where one takes
        longer.
        """
        torch.cuda.reset_peak_memory_stats(step.device)
        replayed = cls(step)
        wanted = LONG_STEPS
        if (wall := replayed.timed().wall / 1e3) < seconds:
            wanted = max(FEWEST_REPLAYS, min(MOST_REPLAYS, round(seconds / wall)))
        samples = [replayed.timed() for _ in range(wanted)]
        return Measurement.of(samples, step.device, loss=loss, attention=attention)
