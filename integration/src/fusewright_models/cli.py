"""The program ``fusewright-train``: one subcommand per model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fusewright.attention import Backend
from fusewright.mixture_head import Scale
from fusewright.norm import layer_norm
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .data import DataName, Task, evaluate
from .data.pictures import draw_predictions
from .devices import checked_device
from .presets import TRANSFORMER_NP, PresetName
from .training import Precision, RunFolder, Trainer, adamw
from .transformer_np import TransformerNP
from .transformer_np_layers import Norm
from .transformer_np_run import LARGEST_SEED, TransformerNPRun

PREDICTIONS = "predictions.png"

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Train a fusewright model. Every subcommand runs without any flag, on data of its own."""


def negative_log_likelihood(model: TransformerNP, task: Task) -> Tensor:
    """The loss of a neural process: minus the mean over B, N and outputs of log p(y)."""
    return model.loss(
        task.x_context, task.y_context, task.x_target, task.y_target, task.context_lengths
    )


@app.command("transformer-np")
def transformer_np(
    data: Annotated[DataName | None, typer.Option(help="Default: digits.")] = None,
    preset: Annotated[
        PresetName | None, typer.Option(help="Sizes of model and training. Default: demo.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Tasks per step.")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak rate: warm-up over a twentieth, then a cosine.")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(min=0.0, help="Of matrices. Default: 0.01.")
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="bf16 is autocast over fp32 parameters. Default: bf16 on cuda."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=LARGEST_SEED, help="Of weights and data. Default: 0."),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Default: --no-compile.")
    ] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="Triton kernels or plain torch. Default: auto.")
    ] = None,
    norm: Annotated[Norm | None, typer.Option(help="Before or after. Default: pre.")] = None,
    scale: Annotated[
        Scale | None, typer.Option(help="Standard deviations as. Default: log_sigma.")
    ] = None,
    indicator: Annotated[
        bool | None, typer.Option("--indicator", help="Tell context rows by one more input.")
    ] = None,
    context_size: Annotated[
        str | None, typer.Option(help="Context points, such as 64 or 3-46, one draw per batch.")
    ] = None,
    target_size: Annotated[str | None, typer.Option(help="Target points, likewise.")] = None,
    ragged: Annotated[
        bool | None, typer.Option("--ragged", help="One draw of context points per task, padded.")
    ] = None,
    log_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between log points. Default: 10.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations with a checkpoint.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder. Default: runs/, model, data and time.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run of this folder; takes no other flag.")
    ] = None,
) -> None:
    """Train a TransformerNP: predict targets from a context set, with their uncertainty.

    Without flags: completion of handwritten digits, some two minutes on two CPU cores. Prints the
    held-out log-likelihood per target before and after, beside the reference that belongs to the
    data, and leaves a folder with config.json, metrics.jsonl, loss.png, predictions.png and
    checkpoint.pt.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    console = Console()
    with _usage_errors():
        run, folder = _resumed(flags) if resume else _new(flags)
    with _usage_errors(folder.config_file if resume else None):
        _check_device(run)
        sampler, held_out = run.sampler(held_out=False), run.sampler(held_out=True)
        model = run.model(sampler.x_width)
        training = run.training()
        optimizer = adamw(model, lr=run.lr, weight_decay=run.weight_decay)
    preset_sizes = TRANSFORMER_NP[run.preset]

    def evaluation() -> dict[str, float]:
        result = evaluate(
            model,
            held_out,
            batches=preset_sizes.evaluation_batches,
            batch_size=preset_sizes.evaluation_batch_size,
        )
        return {
            "held_out_log_likelihood": result.log_likelihood,
            "held_out_standard_error": result.standard_error,
            "reference_log_likelihood": result.reference,
        }

    trainer = Trainer(
        model,
        sampler,
        negative_log_likelihood,
        optimizer,
        training,
        folder,
        evaluate=evaluation,
        console=console,
    )
    console.print(
        f"TransformerNP, {model.parameter_count():,} parameters, {run.data}, {run.device}, "
        f"{run.precision}, into {folder.path}",
        highlight=False,
    )
    with _usage_errors():
        if not resume:
            config = {"model": "transformer-np", "torch": torch.__version__, **asdict(run)}
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
            f"stopped; continue with: fusewright-train transformer-np --resume {folder.path}"
        )
        raise typer.Exit(130) from None
    except FloatingPointError as error:
        console.print(f"stopped: {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    model.eval()
    draw_predictions(model, held_out).savefig(folder.path / PREDICTIONS, dpi=120)
    _report(console, folder, held_out.reference)


def _new(flags: dict[str, Any]) -> tuple[TransformerNPRun, RunFolder]:
    out = flags.pop("out", None)
    run = TransformerNPRun.from_flags(flags)
    name = f"transformer-np-{run.data}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(out or Path("runs", name))
    if folder.holds_a_run:
        raise ValueError(f"{folder.path} holds a run: continue it with --resume, or choose another")
    return run, folder


def _resumed(flags: dict[str, Any]) -> tuple[TransformerNPRun, RunFolder]:
    folder = RunFolder(flags.pop("resume"))
    if flags:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
        raise ValueError(f"--resume takes every choice from its folder; got {names} as well")
    config = folder.read_config()
    if config.pop("model", None) != "transformer-np":
        raise ValueError(f"wanted a run of transformer-np; {folder.path} holds another model's")
    config.pop("torch", None)
    wanted = {field.name for field in fields(TransformerNPRun)}
    if config.keys() != wanted:
        names = ", ".join(sorted(config.keys() ^ wanted))
        raise ValueError(f"the run in {folder.path} was begun by another version: {names} differ")
    try:
        return TransformerNPRun(**config), folder
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder.config_file}: {error}") from error


def _check_device(run: TransformerNPRun) -> None:
    """Fail now rather than in the first step, with the reason that torch or the norm gives."""
    layer_norm(torch.ones(1, 8, device=checked_device(run.device)), backend=run.backend)


@contextmanager
def _usage_errors(file: Path | None = None) -> Iterator[None]:
    """A choice that cannot be served is the caller's to mend: one sentence, no traceback, with the
    file where the choice stood if it was no flag.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise typer.BadParameter(f"{file}: {error}" if file else str(error)) from error


def _report(console: Console, folder: RunFolder, reference: str) -> None:
    lines = [line for line in folder.read_metrics() if "held_out_log_likelihood" in line]
    table = Table(title="held-out log-likelihood per target, nats")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("standard error", justify="right")
    for name, line in (("before training", lines[0]), ("after training", lines[-1])):
        score, error = line["held_out_log_likelihood"], line["held_out_standard_error"]
        table.add_row(name, f"{score:.4f}", f"{error:.4f}")
    table.add_row(reference, f"{lines[-1]['reference_log_likelihood']:.4f}", "")
    console.print(table)
    console.print(f"results in {folder.path}", highlight=False, soft_wrap=True)
