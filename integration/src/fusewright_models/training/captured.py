"""Training steps replayed from CUDA graphs: a step of thousands of small launches is as slow as
the host, and its replay is not.

Forward and backward pass of a batch are one graph for each shape of batches, the optimizer's step
another for each pattern of things that happen in it. A graph is captured once its like has been
taken eagerly, so that everything is compiled, tuned and allocated. Gradients stay in one place
between the graphs, and batches are copied to where a graph reads them: eager and replayed parts of
steps follow one another in any order, and have the same bits. Several processes average their
gradients between the two graphs. What an evaluation computes of a batch is a graph likewise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fusewright.optimizer import DeepNestedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import capturing, reason_of
from .config import TrainingConfig
from .gradients import HeldGradients
from .held_batches import MOST_SHAPES, HeldBatches
from .optimizer_traits import counts, kind, pattern, rate_dtype, set_counts
from .processes import ALONE, Processes
from .source import Batch, Told
from .stepper import Stepper

# The like of a graph is taken so often before it is captured.
WARM_UP = 2


def obstacle(optimizer: Optimizer, processes: Processes = ALONE) -> str | None:
    """Why no step of the optimizer can be captured; None where it can."""
    if processes.shards:
        return f"--parallel {processes.parallel} gathers parameters within a step"
    if processes.parallel == "context":
        return "--parallel context gathers keys and values within a step"
    if isinstance(optimizer, DeepNestedOptimizer) and optimizer.options.update == "continuum":
        # A graph would fire the levels of the step that it captured.
        return "levels of a continuum fire by the host's count of steps"
    first = optimizer.param_groups[0]["params"][0]
    if not first.is_cuda:
        return f"the parameters are on {first.device}, and CUDA graphs want a CUDA device"
    if rate_dtype(optimizer) is None:
        return f"a learning rate of {kind(optimizer)} is a number of the host's"
    return None


def captures(optimizer: Optimizer, config: TrainingConfig, processes: Processes = ALONE) -> bool:
    """Whether steps are replayed from CUDA graphs, as long as no capture fails."""
    return config.capture is not False and obstacle(optimizer, processes) is None


def make_stepper(
    model: nn.Module,
    loss_function: Callable[[Any, Any], Tensor | Told],
    optimizer: Optimizer,
    config: TrainingConfig,
    say: Callable[[str], None],
    processes: Processes = ALONE,
) -> Stepper:
    """Of the kind that ``config.capture`` asks for; ``say`` is told why "auto" is eager on a GPU.

    Raises:
        ValueError: capture is True where it cannot be.
    """
    arguments = model, loss_function, optimizer, config
    reason = obstacle(optimizer, processes)
    if config.capture is True and reason is not None:
        raise ValueError(f"wanted steps that are captured; {reason}")
    if captures(optimizer, config, processes):
        return CapturedStepper(*arguments, processes, say=say)
    stepper = Stepper(*arguments, processes)
    if config.capture == "auto" and stepper.device.type == "cuda":
        say(f"steps are eager: {reason}")
    return stepper


class CapturedStepper(Stepper):
    """Takes the same steps from CUDA graphs, where there is one.

    Where a capture fails, or a batch gives gradients to other parameters than those before, all
    further steps and evaluations are eager and ``say`` is told why, once; with ``capture=True``
    that is an error. Where one of an evaluation fails, evaluations alone are eager from then on.
    Other gradients are an error among several processes, which would average what does not belong
    together.
    """

    def __init__(self, *arguments: Any, say: Callable[[str], None]) -> None:
        super().__init__(*arguments)
        self.say = say
        self.stream = torch.cuda.Stream(self.device)
        # Of several processes each has a thread that asks its device how far messages are.
        self.mode = "thread_local" if self.processes.several else "global"
        self.failed = False
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._drop_graphs()
        self.many_told = self.scores_failed = False
        self.seen: Counter[Hashable] = Counter()
        self.held = HeldGradients(self.parameters, self.processes)

    def _drop_graphs(self) -> None:
        """With the memory that they keep, and what the optimizer keeps for them."""
        forget = getattr(self.optimizer, "forget_captures", None)
        if forget is not None:
            forget()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # What graphs of training and those of evaluations read, and what the latter write.
        self.batches, self.scored_batches = HeldBatches(), HeldBatches()
        self.scores: dict[Hashable, Tensor] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """On the stream that captures, evaluations too: nothing has two streams to wait for."""
        before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(before)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            before.wait_stream(self.stream)

    def joined(self, model: nn.Module) -> nn.Module:
        """The model itself: gradients are averaged here and not in its backward pass."""
        self.processes.same_(model)
        return model

    def add(self, batch: Batch, *, first: bool, last: bool) -> None:
        self.backward(batch, first=first)
        if last and self.processes.several:
            self.held.average_()

    def backward(self, batch: Batch, *, first: bool) -> None:
        held = None if self.failed else self._held(batch)
        if held is None:
            self._backward(batch, first)
            return
        shape, kept = held
        self._run((shape, first), lambda: self._backward(kept, first), self._fail)

    def _held(self, batch: Batch) -> tuple[Hashable, Any] | None:
        """The batch in memory that stays, and its shape; None where it is of one shape too many."""
        try:
            held = self.batches.hold(batch)
        except ValueError as error:
            self._fail(error)
            return None
        if held is None and not self.many_told:
            self.say(f"of more than {MOST_SHAPES} shapes of batches the others stay eager")
            self.many_told = True
        return held

    def _backward(self, batch: Any, first: bool) -> None:
        """Leaves the gradients where they stay, as long as there may be graphs of them."""
        if first:
            for p in self.parameters:
                p.grad = None
        super().backward(batch, first=first)
        # Without graphs gradients may be anywhere, but for those that are averaged.
        if self.failed and not self.processes.several:
            return
        try:
            self.held.hold(first=first)
        except RuntimeError as error:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if capturing or self.processes.several:
                raise
            # Eager steps take the gradients as they are.
            self._fail(error)

    def update(self) -> None:
        before = counts(self.optimizer)
        replayed = self._run(pattern(self.optimizer), self.move, self._fail)
        if replayed:
            set_counts(self.optimizer, [number + 1 for number in before])

    def scored(self, work: Callable[[Any], Tensor], batch: Any) -> Tensor:
        if self.failed or self.scores_failed:
            return work(batch)
        try:
            held = self.scored_batches.hold(batch)
        except ValueError as error:
            self._fail_scores(error)
            held = None
        if held is None:
            return work(batch)
        shape, kept = held

        def score() -> None:
            # What an eager batch has cast for autocast is gone when a graph is replayed.
            with self.autocast(cached=False):
                found = work(kept)
            if shape in self.scores:
                self.scores[shape].copy_(found)
            else:
                # An eager batch comes first.
                self.scores[shape] = found.clone()

        self._run(("scores", shape), score, self._fail_scores)
        # The next batch of the shape writes there.
        return self.scores[shape].clone()

    def _fail_scores(self, error: BaseException) -> None:
        """Say so once, and let go of the graphs of evaluations."""
        self.scores_failed = True
        for shape in self.scores:
            self.graphs.pop(("scores", shape), None)
        self.scored_batches, self.scores = HeldBatches(), {}
        self.say(f"evaluations are eager: {reason_of(error)}")

    def _run(
        self, key: Hashable, work: Callable[[], None], fail: Callable[[BaseException], None]
    ) -> bool:
        """Replay the graph of this key, which may have to be captured first; or do the work eagerly
        and return False. Where the capture fails, ``fail`` is told why.
        """
        if key not in self.graphs and not self.failed and self.seen[key] >= WARM_UP:
            self._capture(key, work, fail)
        if key in self.graphs:
            self.graphs[key].replay()
            return True
        self.seen[key] += 1
        work()
        return False

    def _capture(
        self, key: Hashable, work: Callable[[], None], fail: Callable[[BaseException], None]
    ) -> None:
        before = counts(self.optimizer), [p.grad for p in self.parameters]
        graph = torch.cuda.CUDAGraph()
        options: dict[str, Any] = {"pool": self.pool, "stream": self.stream}
        try:
            with capturing(graph, self.device, capture_error_mode=self.mode, **options):
                work()
        except RuntimeError as error:
            # Nothing of it has run: the same is done eagerly now.
            set_counts(self.optimizer, before[0])
            for p, g in zip(self.parameters, before[1], strict=True):
                p.grad = g
            # What ended the capture, rather than that it ended.
            fail(error.__context__ or error)
            return
        self.graphs[key] = graph

    def _fail(self, error: BaseException) -> None:
        """Say so once, and let go of what is captured: it is not replayed any more."""
        reason = reason_of(error)
        if self.config.capture is True:
            kind_of = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind_of(f"wanted steps that are captured; {reason}") from error
        self.failed = True
        self._drop_graphs()
        if not self.processes.several:
            self.held = HeldGradients(self.parameters, self.processes)
        self.say(f"steps are eager: {reason}")
