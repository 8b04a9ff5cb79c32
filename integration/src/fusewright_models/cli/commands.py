"""What the training commands of all models do alike: open a folder, train into it, stop well."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import typer
from fusewright.norm import layer_norm
from rich.console import Console
from rich.table import Column, Table
from torch import nn
from torch.optim import Optimizer

from ..choices import FORMER
from ..devices import checked_device
from ..training import (
    NotWritten,
    OutOfMemory,
    Processes,
    RunFolder,
    StopSignals,
    Trainer,
    make_optimizer,
    memory_history,
    tensorboard_library,
    wandb_library,
)
from ..training.processes import is_first_of_host, join, launched, process_count
from .options import flag
from .run import NOT_TRAINED, Run, RunT
from .settings_file import by_new_names, read_settings


def open_run(kind: type[RunT], flags: dict[str, Any]) -> tuple[RunT, RunFolder]:
    """The run that the flags of a command line ask for, and its folder; nothing is written.

    Raises:
        TypeError, ValueError, OSError: flags or folder cannot be served.
    """
    return _resumed(kind, flags) if "resume" in flags else _new(kind, flags)


def _new(kind: type[RunT], flags: dict[str, Any]) -> tuple[RunT, RunFolder]:
    out = flags.pop("out", None)
    run = run_of(kind, flags)
    _check_launched(run, flags)
    # Of runs that begin in the same second, too.
    moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = RunFolder(out or Path("runs", f"{run.model_name}-{run.label}-{moment}"))
    check_empty(folder)
    return run, folder


def run_of(kind: type[RunT], flags: Mapping[str, Any]) -> RunT:
    """The run that flags ask for, of which one may be a file of settings.

    Raises:
        TypeError, ValueError, OSError: they cannot be served.
    """
    return kind.from_flags(said_by(kind, flags))


def said_by(kind: type[Run], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that flags say, and of others those of a file that one of them names.

    Raises:
        OSError, ValueError: the file cannot be read, or has no such settings.
    """
    said = dict(flags)
    if (file := said.pop("config", None)) is not None:
        # A flag says more than the file.
        said = read_settings(kind, file, later=kind.later) | said
    return said


def check_empty(folder: RunFolder) -> None:
    """
    Raises:
        ValueError: the folder holds a run or what is left of one.
    """
    if folder.holds_a_run:
        raise ValueError(f"{folder.path} holds a run: continue it with --resume, or choose another")
    if folder.left_over:
        raise ValueError(
            f"wanted a folder without a run's files in --out; got {folder.path}, which holds "
            f"{' and '.join(folder.left_over)} of a run whose config.json is gone"
        )


def _resumed(kind: type[RunT], flags: dict[str, Any]) -> tuple[RunT, RunFolder]:
    folder = RunFolder(flags.pop("resume"))
    if "config" in flags:
        raise ValueError("--resume takes the settings of its folder; got --config as well")
    trained = [name for name in flags if name not in NOT_TRAINED | {"steps"}]
    if trained:
        names = ", ".join(flag(name) for name in trained)
        raise ValueError(f"--resume takes what is trained from its folder; got {names} as well")
    run = replace(read_run(kind, folder), **flags)
    _check_launched(run, flags)
    return run, folder


def _check_launched(run: Run, flags: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: several processes are asked for in a single one.
    """
    if flags.get("parallel") is not None and not launched():
        raise ValueError(
            f"--parallel {run.parallel} is for several processes: start them by torchrun "
            f"--nproc-per-node 2 -m fusewright_models {run.model_name} --parallel {run.parallel}"
        )


def read_run(kind: type[RunT], folder: RunFolder) -> RunT:
    """The run that a folder holds.

    Raises:
        FileNotFoundError: it holds none.
        ValueError: it is another model's, another version's or corrupted.
    """
    config = folder.read_config()
    if "model" not in config:
        got = f"the names {', '.join(config)}" if config else "an empty object"
        raise ValueError(f"wanted the name of a model in {folder.config_file}; got {got}")
    if config.pop("model") != kind.model_name:
        raise ValueError(f"wanted a run of {kind.model_name}; {folder.path} holds another model's")
    config.pop("torch", None)
    config = by_new_names(config)
    wanted = {field.name: field for field in fields(kind)}
    # Runs of before do not say what they did as all did then, nor what changes nothing that is
    # trained: that is the default's.
    config = {name: x for name, x in kind.later.items() if name in wanted} | config
    left_open = {
        name for name in NOT_TRAINED & wanted.keys() if wanted[name].default is not MISSING
    }
    if differ := (config.keys() ^ wanted.keys()) - (left_open - config.keys()):
        names = ", ".join(sorted(differ))
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
    if run.memory_snapshot and device.type != "cuda":
        raise ValueError(f"--memory-snapshot needs a CUDA device; got --device {run.device}")
    if run.wandb:
        wandb_library()
    if run.tensorboard:
        tensorboard_library()


def join_others(run: Run, folder: RunFolder) -> tuple[Processes, RunFolder, Console]:
    """The processes that train the run, the folder of all of them, and where this one prints; after
    `open_run`.

    Raises:
        ValueError, RuntimeError: they cannot train it.
    """
    run.check_shares(process_count())
    if run.capture and run.parallel not in (None, "ddp"):
        raise ValueError(f"wanted --parallel ddp beside --capture; got {run.parallel}")
    processes = join(run.parallel, run.device)
    # The name of a folder has the time in it.
    path = processes.agreed(str(folder.path))
    if not processes.is_main:
        folder = RunFolder(path)
    return processes, folder, plain_console(quiet=not processes.is_main)


def plain_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Prints texts as they are: paths, values and errors may have brackets and colons in them."""
    return Console(quiet=quiet, stderr=stderr, markup=False, emoji=False)


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
        clip_norm=run.clip_norm,
        betas=(run.beta1, run.beta2),
        backend=run.backend,
        weights=run.optimizer_weights,
        rate_factors=run.rate_factors,
    )


def train(trainer: Trainer, run: Run, folder: RunFolder, *, resumed: bool) -> None:
    """Begin the run or take it up where it was left, and train to its end.

    A run that is stopped or fails ends the program, with one sentence: by a signal with 128 and its
    number, by an error with 1.
    """
    console = trainer.console
    processes = trainer.processes
    # None writes before all have looked for a run's files.
    processes.wait()
    go_on = f"continue with: fusewright-train {run.model_name} --resume {folder.path}"
    try:
        with ExitStack() as held:
            with usage_errors():
                stop = held.enter_context(StopSignals(processes))
                processes.first(lambda: _hold(held, run, folder, resumed=resumed))
                if resumed:
                    _take_up(trainer, run, folder)
                if processes.is_main:
                    # Of a run that begins again no line is kept.
                    after = None if trainer.record.noted is None else trainer.step
                    for logger in run.loggers(folder, after=after):
                        trainer.record.observers.append(held.enter_context(logger))
                    if run.memory_snapshot:
                        held.enter_context(memory_history(folder, trainer.record.say))
            trainer.run(stop=stop)
            # All end by the same signal, also by one that has come since the last step.
            stop()
    except KeyboardInterrupt:
        console.print(f"stopped; {go_on}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except FloatingPointError as error:
        console.print(f"stopped: {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except OutOfMemory as error:
        stands = f"step {trainer.step} is saved" if error.saved else _stands(folder)
        # Of several processes any one may have no memory left, and the first one waits for it.
        who = f"process {processes.rank} " if processes.count > 1 else ""
        plain = console if processes.is_main else plain_console()
        plain.print(
            f"{who}stopped: {error}; {stands}; --checkpointing block needs less, and another run "
            f"with a smaller --batch-size and more --gradient-accumulation-steps does; {go_on}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    except NotWritten as error:
        told = f"stopped: {error}; {_stands(folder)}; {go_on}"
        console.print(told, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if stop.received is not None:
        console.print(
            f"stopped by {stop.received.name} after step {trainer.step}, which is saved; {go_on}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(128 + stop.received)


def _stands(folder: RunFolder) -> str:
    return "the last checkpoint stands" if folder.holds_a_checkpoint else "no checkpoint yet"


def _hold(held: ExitStack, run: Run, folder: RunFolder, *, resumed: bool) -> None:
    """Keep other programs out, and begin the run if it is new."""
    held.enter_context(folder.locked())
    if resumed:
        folder.checkpoints.restore()
        return
    # Another program may have begun one there since it was looked at.
    check_empty(folder)
    for name, content in run.files.items():
        folder.write(name, content)
    folder.write_config({"model": run.model_name, "torch": torch.__version__, **asdict(run)})


def _take_up(trainer: Trainer, run: Run, folder: RunFolder) -> None:
    if trainer.processes.agreed(folder.holds_a_checkpoint):
        trainer.resume()
    else:
        # Stopped before its first checkpoint: the run begins again.
        trainer.forget_metrics()
    if trainer.processes.is_main and run != read_run(type(run), folder):
        config = {name: x for name, x in folder.read_config().items() if name not in FORMER}
        folder.write_config(config | asdict(run))


@contextmanager
def usage_errors(file: Path | None = None) -> Iterator[None]:
    """A choice that cannot be served is the caller's to mend: one sentence, no traceback, with the
    file where the choice stood if it was no flag.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise typer.BadParameter(f"{file}: {error}" if file else str(error)) from error


@contextmanager
def host_usage_errors() -> Iterator[None]:
    """Likewise of what all processes of a host find alike: the first of them says so."""
    try:
        with usage_errors():
            yield
    except typer.BadParameter as error:
        if is_first_of_host():
            raise
        raise typer.Exit(error.exit_code) from None


@contextmanager
def shared_usage_errors(processes: Processes) -> Iterator[None]:
    """Likewise of what any process may find: all end, and the first one that has found it says
    so.
    """
    refusal: typer.BadParameter | None = None
    try:
        with usage_errors():
            yield
    except typer.BadParameter as error:
        refusal = error
    found = processes.told(refusal is not None)
    if refusal is not None and found.index(True) == processes.rank:
        raise refusal
    if any(found):
        raise typer.Exit(typer.BadParameter.exit_code)


def results_in(console: Console, folder: RunFolder) -> None:
    console.print(f"results in {folder.path}", highlight=False, soft_wrap=True)


def score_table(
    title: str, columns: tuple[str, str], scores: Iterable[tuple[str, float, str]]
) -> Table:
    """Of each name its score, and what else there is to say of it."""
    table = Table("", *(Column(column, justify="right") for column in columns), title=title)
    for name, score, besides in scores:
        table.add_row(name, f"{score:.4f}", besides)
    return table
