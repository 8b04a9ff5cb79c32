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

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer

from ..choices import FORMER
from .captured import make_stepper
from .checkpoints import Checkpoints, on_host
from .config import TrainingConfig
from .files import Background
from .optimization import warmup_then
from .optimizer_traits import kind, network_digest
from .plots import plot_loss
from .processes import ALONE, Processes
from .run_folder import RunFolder
from .source import Batch, BatchT, Source, Told

# What every checkpoint holds.
STATE = {
    "step",
    "model",
    "optimizer",
    "optimizer_kind",
    "network",
    "skipped_in_a_row",
    "source",
    "torch_rng",
}
# A loss that overflows now and then is no end of a run.
MOST_SKIPPED = 10
NOT_FINITE = "not finite; lower the learning rate or look at the data"

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
        console: where progress is shown.
        observe: is shown every line of metrics as it is written.
        choices: by name, what the run was asked for: checkpoints keep it, and one that was trained
            with others is refused.
        processes: that train the model together; of their folder the first one is the writer.

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
        console: Console | None = None,
        observe: Callable[[dict[str, Any]], None] | None = None,
        choices: dict[str, Any] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.model = model
        self.source = source
        self.optimizer = optimizer
        self.config = config
        self.folder = folder
        self.evaluate = evaluate
        self.console = console or Console()
        self.observe = observe
        self.choices = choices
        self.processes = processes
        self.step = 0
        # Of the last line of metrics, the last evaluation and the last checkpoint.
        self.noted: int | None = None
        self.evaluated: int | None = None
        self.saved: int | None = None
        # Whether the checkpoint's evaluation is to be taken again.
        self.evaluation_lost = False
        self.stepper = make_stepper(model, loss_function, optimizer, config, self._say, processes)
        self.device = self.stepper.device
        # Of the network that the run began with.
        self.network = network_digest(optimizer)
        self.steps_since_log = 0
        self.background = Background()
        self._start_clock()

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
        """
        try:
            self._run(until, stop)
        except BaseException:
            try:
                self.background.wait()
            except OSError as error:
                # Told beside what ends the run.
                self._say(str(error))
            raise
        self.background.wait()

    def _run(self, until: int | None, stop: Callable[[], bool]) -> None:
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        with self._progress() as progress, self.stepper.running():
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
                self.background.raise_error()
                stopping = asks and stop()
            if stopping and self.saved != self.step:
                self._check_numbers()
                self._save()
                self._plot()

    def _checkpoint_is_due(self, evaluation_due: bool, asks: bool) -> bool:
        every = self.config.checkpoint_every
        if every is None:
            return evaluation_due
        if isinstance(every, timedelta):
            passed = time.monotonic() - self.saved_at >= every.total_seconds()
            return asks and self.processes.agreed(passed)
        return self.step % every == 0

    def _save_between_steps(self) -> None:
        """A pause, which is no part of tokens per second."""
        before = time.perf_counter()
        self._save()
        self.clock += time.perf_counter() - before

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

    def _save(self) -> None:
        """Likewise: it is copied now, and written beside what follows. A file that could not be
        written is told of at the next one.
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
            "noted": self.noted,
            "evaluated": self.evaluated,
            "since_log": {"steps": self.steps_since_log, **self.stepper.since_log()},
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
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
        state, file = self._loaded(self.folder.checkpoints)
        if not state.keys() >= STATE:
            raise ValueError(
                f"wanted a checkpoint with {', '.join(sorted(STATE))} in {file}; "
                f"got {', '.join(map(str, state)) or 'nothing'}"
            )
        if state["optimizer_kind"] != kind(self.optimizer):
            raise ValueError(
                f"wanted the state of a {kind(self.optimizer)} in {file}; "
                f"got that of a {state['optimizer_kind']}"
            )
        if state["network"] != self.network:
            raise ValueError(
                f"wanted a run with the network of digest {self.network} in {file}; "
                f"got one with that of {state['network']}"
            )
        # Checkpoints of before have none of what may be absent here and below.
        trained = self._check_choices(state.get("choices"))
        if trained != self.config.steps and self.config.steps <= state["step"]:
            raise ValueError(
                f"wanted more steps than the {state['step']} that the checkpoint in {file} has "
                f"taken; got {self.config.steps}"
            )
        noted = state.get("noted", 0)
        found = [line["step"] for line in self.folder.read_metrics()]
        if noted is not None and not (found and max(found) >= noted):
            got = f"those up to step {max(found)}" if found else "none"
            raise ValueError(
                f"wanted the metrics up to step {noted}, which the checkpoint was saved after, in "
                f"{self.folder.metrics_file}; got {got}"
            )
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
        self.noted = kept[-1]["step"] if kept else None
        # Lines of training have a rate.
        evaluations = [line["step"] for line in kept if "lr" not in line]
        self.evaluated = evaluations[-1] if evaluations else None
        # Its line may have been torn.
        self.evaluation_lost = (
            state.get("evaluated", noted) == self.step and self.evaluated != self.step
        )
        if trained != self.config.steps:
            self._tell_of_other_length(trained, kept)
        # All have read what the first one goes on to write.
        self.processes.wait()

    def _loaded(self, checkpoints: Checkpoints) -> tuple[dict[str, Any], Path]:
        """What all processes read, once all have; where one reads none or another, all raise."""
        error: Exception | None = None
        try:
            state, file = checkpoints.load(self._say)
            read = checkpoints.identity(file)
        except (ValueError, OSError, RuntimeError, MemoryError) as failed:
            error, read = failed, f"none: {failed}"
        found = self.processes.told(read)
        if error is not None:
            raise error
        if len({*found}) > 1:
            got = "; ".join(f"{each} in process {rank}" for rank, each in enumerate(found))
            raise ValueError(
                f"wanted all processes to read one checkpoint of {checkpoints.run}; got {got}"
            )
        return state, file

    def _tell_of_other_length(self, trained: int, kept: list[dict[str, Any]]) -> None:
        rates = [line for line in kept if "lr" in line]
        before = f"from {rates[-1]['lr']:.3g} at step {rates[-1]['step']} " if rates else ""
        after = self.stepper.peak_rates[0] * self._factor()
        self._say(
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
        return self.folder.forget_metrics(after, self._say)

    def _check_choices(self, trained: dict[str, Any] | None) -> int:
        """Raise where the checkpoint was trained with other choices than this run's; returns the
        number of steps that it was to have.
        """
        if trained is None or self.choices is None:
            return self.config.steps
        trained = {FORMER.get(name, name): value for name, value in trained.items()}
        absent = object()
        names = [
            name
            # A resumed run may have another number of them.
            for name in sorted((trained.keys() | self.choices.keys()) - {"steps"})
            if trained.get(name, absent) != self.choices.get(name, absent)
        ]
        if names:
            wanted, got = (
                ", ".join(f"{name} {each.get(name, 'absent')!r}" for name in names)
                for each in (trained, self.choices)
            )
            raise ValueError(
                f"wanted the choices that the run was trained with: {wanted}; got {got}"
            )
        return trained.get("steps", self.config.steps)

    def _factor(self) -> float:
        """Of the peak rates in the next step."""
        config = self.config
        numbers = {"steps": config.steps, "warmup_steps": config.warmup_steps}
        return warmup_then(config.schedule, self.step, **numbers)

    def _take_step(self) -> None:
        self.stepper.take(self._factor(), self._sample)
        self.step += 1
        self.steps_since_log += 1

    def _sample(self) -> Batch:
        size = self.config.batch_size
        batch = self.source.sample(size)
        self.tokens += batch.tokens
        return self.processes.rows(batch, size)

    def _log(self) -> str:
        """Read the sums, write a line, start new sums; returns the state for the progress bar."""
        means = self.stepper.means()
        seconds = time.perf_counter() - self.clock
        loss, norm = means.loss, means.gradient_norm
        counts = {name: int(count) for name, count in means.counts.items() if count}
        counted = "".join(f"; {count} {_read(name)}" for name, count in counts.items())
        if means.skipped_in_a_row >= MOST_SKIPPED:
            raise FloatingPointError(
                f"the last {means.skipped_in_a_row} steps up to {self.step} were skipped in a row, "
                "for losses or gradients that are not finite; lower the learning rate or look at "
                f"the data{counted}"
            )
        if means.taken and not (math.isfinite(loss) and math.isfinite(norm)):
            first = self.step - self.steps_since_log + 1
            raise FloatingPointError(
                f"loss {loss} and gradient norm {norm} on average over steps {first} to "
                f"{self.step}: {NOT_FINITE}{counted}"
            )
        of_taken = {"loss": loss, **means.means, "gradient_norm": norm} if means.taken else {}
        line = of_taken | {
            "lr": self.stepper.rate,
            "tokens_per_second": (self.tokens - means.padding) / seconds,
            "seconds": seconds,
        }
        if means.padding:
            line["padded_tokens_per_second"] = means.padding / seconds
        self._note(line | ({"skipped_steps": means.skipped} if means.skipped else {}) | counts)
        self.steps_since_log = 0
        self._start_clock()
        told = f"loss {loss:.4f}" if means.taken else "all skipped"
        return f"{told}  {line['tokens_per_second']:,.0f} tokens/s{counted}"

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
        """Tokens per second are counted from here: evaluations and pauses are no part of them."""
        self.tokens = 0
        self.stepper.padding.zero_()
        self.clock = time.perf_counter()

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _evaluate(self, progress: Progress) -> None:
        if self.evaluate is None:
            return
        self.model.eval()
        with self.stepper.autocast():
            numbers = self.evaluate()
        self.model.train()
        self._note(numbers)
        self.evaluated, self.evaluation_lost = self.step, False
        shown = ", ".join(f"{_read(name)} {value:.4f}" for name, value in numbers.items())
        progress.console.print(f"step {self.step}: {shown}", highlight=False)

    def _note(self, numbers: dict[str, float]) -> None:
        line = {"step": self.step, **numbers}
        wrong = [f"{_read(name)} {x}" for name, x in numbers.items() if not math.isfinite(x)]
        if wrong:
            raise FloatingPointError(f"{' and '.join(wrong)} at step {self.step}: {NOT_FINITE}")
        if self.folder is not None:
            if self.processes.is_main:
                self.folder.append_metrics(line)
            self.noted = self.step
        if self.observe is not None:
            self.observe(line)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self.console,
        )


def _read(name: str) -> str:
    return name.replace("_", " ")
