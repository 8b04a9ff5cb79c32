"""What the training commands of all models do alike: open a folder, train into it, stop well."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

import torch
import typer
from fusewright.attention import Backend
from fusewright.norm import layer_norm
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from .devices import checked_device
from .training import (
    OptimizerName,
    Precision,
    RunFolder,
    Trainer,
    TrainingConfig,
    make_optimizer,
)

# Flags that say the same of every model.
PeakRate = Annotated[
    float | None,
    typer.Option(
        help="Peak rate: warm-up over a twentieth, then a cosine. Default: the preset's; 0.1 of "
        "the optimizer learned."
    ),
]
OptimizerChoice = Annotated[
    OptimizerName | None, typer.Option("--optimizer", help="Default: adamw.")
]
OptimizerWeights = Annotated[
    str | None,
    typer.Option(help="Of the optimizer learned: a safetensors file. Default: what it ships."),
]
CaptureChoice = Annotated[
    bool | None,
    typer.Option(
        "--capture/--no-capture",
        help="Replay steps from CUDA graphs. Default: on cuda, where that can be done.",
    ),
]
PrecisionChoice = Annotated[
    Precision | None,
    typer.Option(help="bf16 is autocast over fp32 parameters. Default: bf16 on cuda."),
]
Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one.")]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Default: --no-compile.")
]
BackendChoice = Annotated[
    Backend | None, typer.Option(help="Triton kernels or plain torch. Default: auto.")
]
LogEvery = Annotated[int | None, typer.Option(min=1, help="Steps between log points. Default: 10.")]
EvaluateEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps between evaluations with a checkpoint.")
]


class Run(Protocol):
    """A frozen dataclass with every choice of one training run."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    model_name: ClassVar[str]

    @property
    def device(self) -> str: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def label(self) -> str: ...

    @property
    def optimizer(self) -> OptimizerName: ...

    @property
    def optimizer_weights(self) -> str | None: ...

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def capture(self) -> bool | None: ...

    @property
    def rate_factors(self) -> Mapping[str, float]: ...

    def training(self) -> TrainingConfig: ...

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> Self: ...


RunT = TypeVar("RunT", bound=Run)


def open_run(kind: type[RunT], flags: dict[str, Any]) -> tuple[RunT, RunFolder]:
    """The run that the flags of a command line ask for, and its folder; nothing is written.

    Raises:
        TypeError, ValueError, OSError: flags or folder cannot be served.
    """
    return _resumed(kind, flags) if "resume" in flags else _new(kind, flags)


def _new(kind: type[RunT], flags: dict[str, Any]) -> tuple[RunT, RunFolder]:
    out = flags.pop("out", None)
    run = kind.from_flags(flags)
    name = f"{run.model_name}-{run.label}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(out or Path("runs", name))
    if folder.holds_a_run:
        raise ValueError(f"{folder.path} holds a run: continue it with --resume, or choose another")
    return run, folder


def _resumed(kind: type[RunT], flags: dict[str, Any]) -> tuple[RunT, RunFolder]:
    folder = RunFolder(flags.pop("resume"))
    if flags:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
        raise ValueError(f"--resume takes every choice from its folder; got {names} as well")
    return read_run(kind, folder), folder


def read_run(kind: type[RunT], folder: RunFolder) -> RunT:
    """The run that a folder holds.

    Raises:
        FileNotFoundError: it holds none.
        ValueError: it is another model's, another version's or corrupted.
    """
    config = folder.read_config()
    if config.pop("model", None) != kind.model_name:
        raise ValueError(f"wanted a run of {kind.model_name}; {folder.path} holds another model's")
    config.pop("torch", None)
    wanted = {field.name for field in fields(kind)}
    if config.keys() != wanted:
        names = ", ".join(sorted(config.keys() ^ wanted))
        raise ValueError(f"the run in {folder.path} was begun by another version: {names} differ")
    try:
        return kind(**config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder.config_file}: {error}") from error


def check_device(run: Run) -> None:
    """Fail now rather than in the first step, with the reason that torch or the norm gives."""
    device = checked_device(run.device)
    layer_norm(torch.ones(1, 8, device=device), backend=run.backend)
    if run.capture and device.type != "cuda":
        raise ValueError(f"--capture needs a CUDA device; got --device {run.device}")


def optimizer_of(run: Run, model: nn.Module) -> Optimizer:
    """The optimizer that the run asks for.

    Raises:
        ValueError, OSError, RuntimeError: it cannot be had.
    """
    return make_optimizer(
        run.optimizer,
        model,
        lr=run.lr,
        weight_decay=run.weight_decay,
        clip_norm=run.training().clip_norm,
        backend=run.backend,
        weights=run.optimizer_weights,
        rate_factors=run.rate_factors,
    )


def train(trainer: Trainer, run: Run, folder: RunFolder, *, resumed: bool) -> None:
    """Begin the run or take it up where it was left, and train to its end.

    A run that is stopped or fails ends the program, with one sentence.
    """
    console = trainer.console
    with usage_errors():
        if not resumed:
            config = {"model": run.model_name, "torch": torch.__version__, **asdict(run)}
            folder.write_config(config)
        elif folder.holds_a_checkpoint:
            trainer.resume()
        else:
            # Stopped before its first checkpoint: the run begins again.
            folder.forget_metrics()
    try:
        trainer.run()
    except KeyboardInterrupt:
        console.print(
            f"stopped; continue with: fusewright-train {run.model_name} --resume {folder.path}"
        )
        raise typer.Exit(130) from None
    except FloatingPointError as error:
        console.print(f"stopped: {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@contextmanager
def usage_errors(file: Path | None = None) -> Iterator[None]:
    """A choice that cannot be served is the caller's to mend: one sentence, no traceback, with the
    file where the choice stood if it was no flag.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise typer.BadParameter(f"{file}: {error}" if file else str(error)) from error


def results_in(console: Console, folder: RunFolder) -> None:
    console.print(f"results in {folder.path}", highlight=False, soft_wrap=True)
