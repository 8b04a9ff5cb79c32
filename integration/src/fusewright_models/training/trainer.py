"""One training loop for every model: batch, loss, gradients, clip, step.

Nothing in a step waits for the device: losses and gradient norms are summed where they are computed
and read once per log point, batches come from a source on the device, the schedule is host
arithmetic. A loss or gradient norm that is not finite spoils the parameters at once and is noticed
at the next log point, where training stops with an error; a log point precedes every checkpoint, so
the checkpoint on disk is always one from before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer

from .optimization import warmup_cosine
from .plots import plot_loss
from .run_folder import RunFolder

Precision = Literal["fp32", "bf16"]
PRECISIONS = get_args(Precision)
# What every checkpoint holds.
STATE = {"step", "model", "optimizer", "source", "torch_rng"}


class Batch(Protocol):
    """What the loop asks of a batch; the rest is between source and loss function."""

    @property
    def tokens(self) -> int: ...


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)
ModelT = TypeVar("ModelT", bound=nn.Module)


class Source(Protocol[BatchT_co]):
    """Endless batches, made or kept on the device that trains, whose order can be continued."""

    def sample(self, batch: int) -> BatchT_co: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        steps: optimizer steps in all; the cosine ends there.
        batch_size: what the source is asked for.
        accumulation_steps: batches whose mean gradient one optimizer step follows.
        warmup_steps: steps of linear warm-up.
        clip_norm: largest 2-norm of all gradients together; longer ones are scaled down to it.
        precision: "fp32", or "bf16" for autocast over fp32 parameters.
        compile: put forward pass and loss through torch.compile.
        log_every: steps between two log points.
        evaluate_every: steps between two evaluations, each with a checkpoint; the end has both.
    """

    steps: int
    batch_size: int
    accumulation_steps: int = 1
    warmup_steps: int = 0
    clip_norm: float = 1.0
    precision: Precision = "fp32"
    compile: bool = False
    log_every: int = 10
    evaluate_every: int = 100

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulation_steps", "log_every", "evaluate_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps must be 0 to {self.steps}; got {self.warmup_steps}")
        if not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive; got {self.clip_norm}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}; got {self.precision!r}")


class Trainer:
    """Trains a model and keeps its run folder.

    Args:
        model: on the device that trains.
        source: gives the batches.
        loss_function: ``(model, batch)`` to a scalar loss, the mean over whatever counts.
        optimizer: over the model's parameters; its rates are the schedule's peaks.
        config: how to train.
        folder: where metrics, loss curve and checkpoint go.
        evaluate: numbers of the model as it stands, by name; called before the first step and at
            every evaluation point, under the precision of the training.
        console: where progress is shown.
        observe: is shown every line of metrics as it is written.
    """

    def __init__(
        self,
        model: ModelT,
        source: Source[BatchT],
        loss_function: Callable[[ModelT, BatchT], Tensor],
        optimizer: Optimizer,
        config: TrainingConfig,
        folder: RunFolder,
        *,
        evaluate: Callable[[], dict[str, float]] | None = None,
        console: Console | None = None,
        observe: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.model = model
        self.source = source
        self.loss_function = torch.compile(loss_function) if config.compile else loss_function
        self.optimizer = optimizer
        self.peak_rates = [group["lr"] for group in optimizer.param_groups]
        self.config = config
        self.folder = folder
        self.evaluate = evaluate
        self.console = console or Console()
        self.observe = observe
        self.step = 0
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        # [loss, gradient norm], summed since the last log point
        self.sums = torch.zeros(2, device=self.device)
        self.steps_since_log = 0
        self._start_clock()

    def run(self, until: int | None = None) -> None:
        """Train up to step ``until``, by default to the end of the schedule.

        Raises:
            FloatingPointError: a loss or gradient norm since the last log point was not finite.
        """
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        with self._progress() as progress:
            bar = progress.add_task("training", total=config.steps, completed=self.step, state="")
            if self.step == 0:
                self._evaluate(progress)
            self._start_clock()
            while self.step < last:
                self._take_step()
                self.step += 1
                self.steps_since_log += 1
                progress.update(bar, completed=self.step)
                finished = self.step == config.steps
                evaluation_due = finished or self.step % config.evaluate_every == 0
                if evaluation_due or self.step % config.log_every == 0:
                    progress.update(bar, state=self._log())
                if evaluation_due:
                    self._evaluate(progress)
                    self.save()
                    self._start_clock()

    def save(self) -> None:
        """Write checkpoint and loss curve."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "source": self.source.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        self.folder.save_checkpoint(state)
        plot_loss(self.folder)

    def resume(self) -> None:
        """Continue from the folder's checkpoint: the steps to come are those of one long run.

        Bit for bit on the same kind of device, where the model's own operations are deterministic.

        Raises:
            FileNotFoundError: the folder holds no checkpoint.
            ValueError: the file is damaged, or the checkpoint of another model.
        """
        state, file = self.folder.load_checkpoint(), self.folder.checkpoint_file
        if not state.keys() >= STATE:
            raise ValueError(
                f"wanted a checkpoint with {', '.join(sorted(STATE))} in {file}; "
                f"got {', '.join(map(str, state)) or 'nothing'}"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"wanted this model's checkpoint in {file}; got: {error}") from error
        self.source.load_state_dict(state["source"])
        torch.set_rng_state(state["torch_rng"])
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.step = state["step"]
        self.folder.forget_metrics(after=self.step)

    def _take_step(self) -> None:
        config = self.config
        factor = warmup_cosine(self.step, steps=config.steps, warmup_steps=config.warmup_steps)
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = factor * peak
        loss = torch.zeros((), device=self.device)
        for _ in range(config.accumulation_steps):
            batch = self.source.sample(config.batch_size)
            with self._autocast():
                share = self.loss_function(self.model, batch) / config.accumulation_steps
            share.backward()
            loss = loss + share.detach()
            self.tokens += batch.tokens
        norm = nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.sums += torch.stack([loss, norm])

    def _autocast(self) -> torch.autocast:
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16)

    def _log(self) -> str:
        """Read the sums, write a line, start new sums; returns the state for the progress bar."""
        loss, norm = (self.sums / self.steps_since_log).tolist()  # sync: once per log point
        rate = self.tokens / (time.perf_counter() - self.clock)
        if not (abs(loss) < float("inf") and norm < float("inf")):
            first = self.step - self.steps_since_log + 1
            raise FloatingPointError(
                f"loss {loss} and gradient norm {norm} on average over steps {first} to "
                f"{self.step}: not finite; lower the learning rate or look at the data"
            )
        self._note(
            {
                "loss": loss,
                "gradient_norm": norm,
                "lr": self.optimizer.param_groups[0]["lr"],
                "tokens_per_second": rate,
            }
        )
        self.sums.zero_()
        self.steps_since_log = 0
        self._start_clock()
        return f"loss {loss:.4f}  {rate:,.0f} tokens/s"

    def _start_clock(self) -> None:
        """Tokens per second are counted from here: evaluations and pauses are no part of them."""
        self.tokens = 0
        self.clock = time.perf_counter()

    def _evaluate(self, progress: Progress) -> None:
        if self.evaluate is None:
            return
        self.model.eval()
        with self._autocast():
            numbers = self.evaluate()
        self.model.train()
        self._note(numbers)
        shown = ", ".join(
            f"{name.replace('_', ' ')} {value:.4f}" for name, value in numbers.items()
        )
        progress.console.print(f"step {self.step}: {shown}", highlight=False)

    def _note(self, numbers: dict[str, float]) -> None:
        line = {"step": self.step, **numbers}
        self.folder.append_metrics(line)
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
