"""Files in a run's folder for the tools that show what steps do and what holds memory."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..files import writing
from ..run_folder import RunFolder

TRACE, SNAPSHOT = "trace.json.gz", "memory.pickle"
# What a snapshot tells of: so many allocations and frees, the last ones.
MOST_EVENTS = 100_000


def steps_of(text: str) -> range:
    """The steps of "10:20", the first and the last.

    Raises:
        ValueError: it is something else, or no step.
    """
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not steps or steps[0] < 1:
        raise ValueError(
            f"profile must be a first step and a last one, such as 10:20; got {text!r}"
        )
    return steps


class Trace:
    """What runs when in some steps, by torch's profiler, for Perfetto or chrome://tracing.

    Args:
        steps: which.
        folder: where ``trace.json.gz`` goes, when the last of them has been taken, or as many as
            there are.
        device: that trains.
        say: is told of the file.
    """

    def __init__(
        self, steps: range, folder: RunFolder, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self.steps, self.folder, self.device, self.say = steps, folder, device, say
        self.profiler: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the step of that number, of which the trace has a range if it is one of them."""
        if number not in self.steps:
            yield
            return
        if self.profiler is None:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.start()
        with record_function(f"step {number}"):
            yield

    def tell_of_steps_before(self, first: int) -> None:
        """Say so where a run goes on from step ``first``, and none of these steps is to come."""
        if self.steps[-1] < first:
            self.say(
                f"no trace of steps {self.steps[0]} to {self.steps[-1]} is written: the run goes "
                f"on from step {first}"
            )

    def ends_with(self, number: int) -> bool:
        """Whether the step of that number is the last one of a trace that has begun."""
        return self.profiler is not None and number == self.steps[-1]

    def write(self) -> None:
        """The file, if a trace has begun.

        Raises:
            NotWritten: the disk is full, for instance.
        """
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # sync: what was launched is part of the steps
        profiler.stop()
        place = self.folder.path / TRACE
        with writing(place), TemporaryDirectory(prefix="fusewright-") as made:
            file = Path(made, TRACE)
            profiler.export_chrome_trace(str(file))
            self.folder.write(TRACE, file.read_bytes())
        self.say(f"the trace is in {place}: open it at https://ui.perfetto.dev")


@contextmanager
def memory_history(folder: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Around a training on a GPU: who allocated what, in ``memory.pickle`` at its end, whatever
    ends it, for https://pytorch.org/memory_viz.

    Raises:
        NotWritten: the disk is full, for instance.
    """
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    try:
        yield
    finally:
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        folder.write(SNAPSHOT, pickle.dumps(snapshot))
        say(f"the memory is in {folder.path / SNAPSHOT}: open it at https://pytorch.org/memory_viz")
