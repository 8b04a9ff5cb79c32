"""One training loop for every model: batch, loss, gradients, clip, step.

Nothing in a step waits for the device: losses and gradient norms are summed where they are computed
and read once per log point, batches come from a source on the device, the schedule is host
arithmetic. On a GPU whole steps are replayed from CUDA graphs where that can be done.

What is not finite is noticed at the next log point. An optimizer that skips a step whose gradients
have no finite norm leaves everything as it was: such steps are counted apart, and training stops
where the last ten and more were skipped. Any other loss or norm that is not finite stops it at
once. A look at them and at the parameters precedes every checkpoint: those on disk are always from
before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import Optimizer

from .captured import make_stepper
from .checkpoints import on_host
from .config import TrainingConfig
from .files import Background
from .optimization import warmup_then
from .optimizer_traits import kind, network_digest
from .processes import ALONE, Processes
from .reporting.incidents import Incidents, Watch
from .reporting.plots import plot_loss
from .reporting.profiling import Trace
from .reporting.record import (
    NOT_FINITE,
    Clock,
    Record,
    Speed,
    Spent,
    check_means,
    shown,
    state_of,
    training_line,
)
from .resuming import check_metrics, check_optimizer, read_state, trained_steps
from .run_folder import RunFolder, is_of_training
from .shortage import OutOfMemory, asked_for
from .source import Batch, BatchT, Source, Told

ModelT = TypeVar("ModelT", bound=nn.Module)


def never() -> bool:
    return False


class Trainer:
    """Trains a model and keeps its run folder.

    Args:
        model: on the device that trains.
        source: gives the batches.
        loss_function: ``(model, batch)`` to a scalar loss, the mean over whatever counts, or to
            all that is `Told`.
        optimizer: over the model's parameters; its rates are the schedule's peaks.
        config: how to train.
        folder: where metrics, loss curve and checkpoint go; None keeps nothing.
        evaluate: numbers of the model as it stands, by name; called before the first step and at
            every evaluation point, under the precision of the training.
        evaluate_part: is called in its place before the last step.
        console: where progress is shown.
        observe: is shown every line of metrics as it is written.
        choices: by name, what the run was asked for: checkpoints keep it, and one that was trained
            with others is refused.
        processes: that train the model together; of their folder the first one is the writer.
        operations: of the matrix products of a step, for each token; None where they are not
            counted, and no line tells their share of what the device could do.

    Raises:
        ValueError: ``config.capture`` is True where steps cannot be captured.
    """

    def __init__(
        self,
        model: ModelT,
        source: Source[BatchT],
        loss_function: Callable[[ModelT, BatchT], Tensor | Told],
        optimizer: Optimizer,
        config: TrainingConfig,
        folder: RunFolder | None,
        *,
        evaluate: Callable[[], dict[str, float]] | None = None,
        evaluate_part: Callable[[], dict[str, float]] | None = None,
        console: Console | None = None,
        observe: Callable[[dict[str, Any]], None] | None = None,
        choices: dict[str, Any] | None = None,
        processes: Processes = ALONE,
        operations: float | None = None,
    ) -> None:
        self.model = model
        self.source = source
        self.optimizer = optimizer
        self.config = config
        self.folder = folder
        self.evaluate, self.evaluate_part = evaluate, evaluate_part or evaluate
        self.console = console or Console()
        self.record = Record(folder, self.console, processes)
        if observe is not None:
            self.record.observers.append(observe)
        self.choices = choices
        self.processes = processes
        self.step = 0
        # Of the last evaluation and the last checkpoint.
        self.evaluated: int | None = None
        self.saved: int | None = None
        # Whether the checkpoint's evaluation is to be taken again.
        self.evaluation_lost = False
        self.stepper = make_stepper(
            model, loss_function, optimizer, config, self.record.say, processes
        )
        self.device = self.stepper.device
        # Of the network that the run began with.
        self.network = network_digest(optimizer)
        self.steps_since_log = 0
        self.background = Background()
        self.clock = Clock()
        self.speed = Speed(self.device, processes.count, operations)
        self.incidents, self.spent = Incidents(config.clip_norm), Spent()
        self.watch = Watch(self.record.say)
        # What the step that is being taken found.
        self.begun: dict[str, Any] | None = None
        self.trace: Trace | None = None
        if config.profile is not None and folder is not None and processes.is_main:
            self.trace = Trace(config.profile, folder, self.device, self.record.say)

    def run(self, until: int | None = None, *, stop: Callable[[], bool] = never) -> None:
        """Train up to step ``until``, by default to the end of the schedule.

        Args:
            until: as above.
            stop: is asked after each step, of several processes by all of them after each log
                point; where it says yes, a checkpoint ends the run.

        Raises:
            FloatingPointError: a loss, a gradient norm or a parameter was not finite, or ten and
                more steps in a row were skipped.
            NotWritten: a file of the folder could not be; the last checkpoint stands.
            OutOfMemory: memory ran out.
        """
        asked: str | None = None
        try:
            with self.watch:
                self._run(until, stop)
        except BaseException as ended:
            try:
                self.background.wait()
                if self.trace is not None:
                    self.trace.write()
            except OSError as error:
                # Told beside what ends the run.
                self.record.say(str(error))
            asked = asked_for(ended)
            if asked is None:
                raise
        # What the step has allocated is let go with its error.
        if asked is not None:
            self._tell_of_shortage(asked)
        self.background.wait()

    def _run(self, until: int | None, stop: Callable[[], bool]) -> None:
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        with self.record.bar() as progress, self.stepper.running():
            bar = progress.add_task("training", total=config.steps, completed=self.step, state="")
            stopping = stop()
            begins = self.step == 0 and self.evaluated is None
            if (begins or self.evaluation_lost) and not stopping:
                self._evaluate(progress)
                stopping = stop()
            self.saved_at = time.monotonic()
            self._start_clock()
            while self.step < last and not stopping:
                self._take_step()
                self.watch.comes(self.step)
                progress.update(bar, completed=self.step)
                finished = self.step == config.steps
                evaluation_due = finished or self.step % config.evaluate_every == 0
                logs = evaluation_due or self.step % config.log_every == 0
                # Several processes agree on what only one may know where they wait anyway.
                asks = logs or not self.processes.several
                checkpoint_due = finished or self._checkpoint_is_due(evaluation_due, asks)
                if logs:
                    progress.update(bar, state=self._log())
                if evaluation_due or checkpoint_due:
                    self._check_numbers()
                if evaluation_due:
                    self._evaluate(progress)
                if checkpoint_due:
                    self._save_between_steps()
                if evaluation_due:
                    self._plot()
                    self._start_clock()
                self.watch.comes(self.step)
                self.background.raise_error()
                stopping = asks and stop()
            if stopping and self.saved != self.step:
                self._check_numbers()
                self._save()
                self._plot()
        if self.trace is not None:
            self.trace.write()

    def _checkpoint_is_due(self, evaluation_due: bool, asks: bool) -> bool:
        every = self.config.checkpoint_every
        if every is None:
            return evaluation_due
        if isinstance(every, timedelta):
            passed = time.monotonic() - self.saved_at >= every.total_seconds()
            return asks and self.processes.agreed(passed)
        return self.step % every == 0

    def _save_between_steps(self) -> None:
        with self.clock.paused():
            self._save()

    def _plot(self) -> None:
        if self.folder is not None and self.processes.is_main:
            plot_loss(self.folder)

    def save(self) -> None:
        """Save a checkpoint, where there is a folder.

        Raises:
            NotWritten: it could not be.
        """
        self._save()
        self.background.wait()

    def _save(self, **other: Any) -> None:
        """Likewise: it is copied now, and written beside what follows. A file that could not be
        written is told of at the next one. In the state ``other`` stands for what the run has.
        """
        if self.folder is None:
            return
        # One at a time is copied.
        self.background.wait()
        state = {
            "step": self.step,
            "model": self.processes.whole(self.model.state_dict()),
            "optimizer": self.stepper.optimizer_state(),
            "optimizer_kind": kind(self.optimizer),
            "network": self.network,
            "skipped_in_a_row": int(self.stepper.skipped_in_a_row),  # sync: once per checkpoint
            "source": self.source.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "choices": self.choices,
            "noted": self.record.noted,
            "evaluated": self.evaluated,
            "since_log": {"steps": self.steps_since_log, **self.stepper.since_log()},
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        state |= other
        if self.processes.is_main:
            write = partial(self.folder.save_checkpoint, on_host(state), keep=self.config.keep)
            self.background.start(write)
        self.saved, self.saved_at = self.step, time.monotonic()

    def resume(self) -> None:
        """Continue from the folder's checkpoint: the steps to come are those of one long run.

        Bit for bit on the same kind of device, where the model's own operations are deterministic.
        A damaged checkpoint is passed over for the one before it. Where the number of steps is
        another than the run was trained with, the schedule is the one of that number from here on.
        Both are told.

        Raises:
            FileNotFoundError: the folder holds no checkpoint.
            ValueError: there is no folder, a file is damaged, metrics are missing, or the
                checkpoint is of another model, optimizer or network of it, of other choices, of
                other data, or of as many steps as are wanted in all.
        """
        if self.folder is None:
            raise ValueError("wanted a run folder to resume from; got none")
        self.background.wait()
        state, file = read_state(self.folder.checkpoints, self.record, self.processes)
        check_optimizer(state, file, kind=kind(self.optimizer), network=self.network)
        # Checkpoints of before have none of what may be absent here and below.
        trained = trained_steps(state.get("choices"), self.choices, self.config.steps)
        if trained != self.config.steps and self.config.steps <= state["step"]:
            raise ValueError(
                f"wanted more steps than the {state['step']} that the checkpoint in {file} has "
                f"taken; got {self.config.steps}"
            )
        noted = state.get("noted", 0)
        check_metrics(self.folder, noted)
        # It refuses other data before the model is touched.
        self.source.load_state_dict(state["source"])
        try:
            self.processes.load_model(self.model, state["model"])
            self.processes.load_optimizer(self.optimizer, state["optimizer"])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            # The text of a missing key is the key alone.
            told = repr(error) if isinstance(error, LookupError) else error
            raise ValueError(f"wanted this model's checkpoint in {file}; got: {told}") from error
        torch.set_rng_state(state["torch_rng"])
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.step = state["step"]
        self.stepper.forget()
        self.stepper.skipped_in_a_row.fill_(state["skipped_in_a_row"])
        since_log = state.get("since_log")
        self.steps_since_log = 0 if since_log is None else since_log["steps"]
        if since_log is not None:
            self.stepper.load_since_log(since_log)
        self.saved = self.step
        if self.processes.is_main:
            self.folder.checkpoints.set_aside(after=self.step)
        kept = self.forget_metrics(after=self.step)
        self.record.noted = kept[-1]["step"] if kept else None
        self.spent = Spent()
        for line in kept:
            self.incidents.look(line)
            self.spent.look(line)
        evaluations = [line["step"] for line in kept if not is_of_training(line)]
        self.evaluated = evaluations[-1] if evaluations else None
        # Its line may have been torn.
        self.evaluation_lost = (
            state.get("evaluated", noted) == self.step and self.evaluated != self.step
        )
        if trained != self.config.steps:
            self._tell_of_other_length(trained, kept)
        if self.trace is not None:
            self.trace.tell_of_steps_before(self.step + 1)
        # All have read what the first one goes on to write.
        self.processes.wait()

    def _tell_of_other_length(self, trained: int, kept: list[dict[str, Any]]) -> None:
        rates = [line for line in kept if is_of_training(line)]
        before = f"from {rates[-1]['lr']:.3g} at step {rates[-1]['step']} " if rates else ""
        after = self.stepper.peak_rates[0] * self._factor()
        self.record.say(
            f"the run is to have {self.config.steps} steps, not {trained}: its schedule is the one "
            f"of {self.config.steps} steps from here on, and the rate goes {before}to {after:.3g} "
            f"at step {self.step + 1}"
        )

    def forget_metrics(self, after: int = -1) -> list[dict[str, Any]]:
        """Drop the lines of steps past ``after``, and tell of a torn end that is dropped; returns
        those that are kept.
        """
        assert self.folder is not None
        if not self.processes.is_main:
            return [line for line in self.folder.read_metrics() if line["step"] <= after]
        return self.folder.forget_metrics(after, self.record.say)

    def _factor(self) -> float:
        """Of the peak rates in the next step."""
        config = self.config
        numbers = {"steps": config.steps, "warmup_steps": config.warmup_steps}
        return warmup_then(config.schedule, self.step, **numbers)

    def _take_step(self) -> None:
        number = self.step + 1
        self.begun = self._before_step()
        with nullcontext() if self.trace is None else self.trace.step(number):
            self.stepper.take(self._factor(), self._sample)
        self.step = number
        self.begun = None
        self.steps_since_log += 1
        if self.trace is not None and self.trace.ends_with(number):
            with self.clock.paused():
                self.trace.write()

    def _before_step(self) -> dict[str, Any]:
        """What the step changes before the optimizer moves, but for what the stepper keeps."""
        if self.folder is None or self.processes.several:
            return {}
        before = {"source": self.source.state_dict(), "torch_rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            before["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        return before

    def _tell_of_shortage(self, asked: str) -> None:
        """Save what there is before the step or the evaluation that memory ran out in, if that is
        whole; by one process alone, since others wait for this one elsewhere.

        Raises:
            OutOfMemory: always.
        """
        where, before = f"the evaluation after step {self.step}", {"evaluated": self.step}
        if self.begun is not None:
            where, before = f"step {self.step + 1}", self.begun
            if not self.stepper.moving:
                self.stepper.undo()
        saved = self.saved == self.step
        if before and not (saved or self.stepper.moving or self.processes.several):
            saved = self._save_if_it_fits(before)
        size = f"batches of {self.config.batch_size} in {self.config.precision}"
        raise OutOfMemory(f"out of memory in {where}, with {size}: {asked}", saved=saved)

    def _save_if_it_fits(self, before: dict[str, Any]) -> bool:
        """Whether there is memory for a copy of the state, and a folder."""
        try:
            self._save(**before)
            self.background.wait()
        except (MemoryError, RuntimeError) as error:
            if asked_for(error) is None:
                raise
            return False
        return self.folder is not None

    def _sample(self) -> Batch:
        size = self.config.batch_size
        batch = self.source.sample(size)
        self.clock.tokens += batch.tokens
        return self.processes.rows(batch, size)

    def _log(self) -> str:
        """Read the sums, write a line, start new sums; returns the state for the progress bar."""
        means = self.stepper.means()
        speed = self.speed.numbers(self.clock.tokens, means.padding, self.clock.seconds)
        check_means(means, range(self.step - self.steps_since_log + 1, self.step + 1))
        line = training_line(means, self.stepper.rate, speed)
        self.spent.look(line)
        for text in self.incidents.look(self.record.note(self.step, line)):
            self.record.say(text)
        self.steps_since_log = 0
        self._start_clock()
        return state_of(means, line)

    def _check_numbers(self) -> None:
        """Losses tell of the parameters before a step, not after it."""
        if not self.stepper.sums_are_sound():
            first = self.step - self.steps_since_log + 1
            what = f"loss or gradient norm over steps {first} to {self.step}"
        elif not self.stepper.is_sound():
            what = f"parameters after step {self.step}"
        else:
            return
        raise FloatingPointError(f"{what}: {NOT_FINITE}")

    def _start_clock(self) -> None:
        """Tokens per second are counted from here, on the device too."""
        self.stepper.padding.zero_()
        self.clock.start()

    def _evaluate(self, progress: Progress) -> None:
        evaluate = self.evaluate if self.step == self.config.steps else self.evaluate_part
        if evaluate is None:
            return
        self.model.eval()
        before = time.perf_counter()
        with self.stepper.autocast():
            numbers = evaluate()
        seconds = time.perf_counter() - before
        self.model.train()
        self.spent.look({"evaluation_seconds": seconds})
        times = {"evaluation_seconds": seconds, "evaluation_share": self.spent.share}
        self.record.note(self.step, numbers | times)
        self.evaluated, self.evaluation_lost = self.step, False
        progress.console.print(f"step {self.step}: {shown(numbers)}", highlight=False)
