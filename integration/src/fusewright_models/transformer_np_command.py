"""The subcommand that trains a TransformerNP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fusewright.mixture_head import Scale
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .commands import (
    BackendChoice,
    CaptureChoice,
    Compile,
    Device,
    EvaluateEvery,
    LogEvery,
    OptimizerChoice,
    OptimizerWeights,
    PeakRate,
    PrecisionChoice,
    check_device,
    open_run,
    optimizer_of,
    results_in,
    train,
    usage_errors,
)
from .data import DataName, Task, evaluate
from .data.pictures import draw_predictions
from .presets import TRANSFORMER_NP, PresetName
from .run_fields import LARGEST_SEED
from .training import RunFolder, Trainer
from .transformer_np import TransformerNP
from .transformer_np_layers import Norm
from .transformer_np_run import TransformerNPRun

PREDICTIONS = "predictions.png"


def negative_log_likelihood(model: TransformerNP, task: Task) -> Tensor:
    """The loss of a neural process: minus the mean over B, N and outputs of log p(y)."""
    return model.loss(
        task.x_context, task.y_context, task.x_target, task.y_target, task.context_lengths
    )


def transformer_np(
    data: Annotated[DataName | None, typer.Option(help="Default: digits.")] = None,
    preset: Annotated[
        PresetName | None, typer.Option(help="Sizes of model and training. Default: demo.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Tasks per step.")] = None,
    optimizer: OptimizerChoice = None,
    optimizer_weights: OptimizerWeights = None,
    lr: PeakRate = None,
    weight_decay: Annotated[
        float | None, typer.Option(min=0.0, help="Of matrices. Default: 0.01; 0 of learned.")
    ] = None,
    precision: PrecisionChoice = None,
    device: Device = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=LARGEST_SEED, help="Of weights and data. Default: 0."),
    ] = None,
    compile: Compile = None,
    capture: CaptureChoice = None,
    backend: BackendChoice = None,
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
    log_every: LogEvery = None,
    eval_every: EvaluateEvery = None,
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
    with usage_errors():
        run, folder = open_run(TransformerNPRun, flags)
    with usage_errors(folder.config_file if resume else None):
        check_device(run)
        sampler, held_out = run.sampler(held_out=False), run.sampler(held_out=True)
        model = run.model(sampler.x_width)
        training = run.training()
        chosen = optimizer_of(run, model)
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
        chosen,
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
    train(trainer, run, folder, resumed=resume is not None)
    model.eval()
    draw_predictions(model, held_out).savefig(folder.path / PREDICTIONS, dpi=120)
    _report(console, folder, held_out.reference)


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
    results_in(console, folder)
