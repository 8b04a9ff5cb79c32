"""What the subcommand does that trains a TransformerNP."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from torch import Tensor

from ..choices import DATA_NAMES
from ..data import (
    LEVELS,
    DrawnAhead,
    DrawnInTurn,
    Evaluation,
    Evaluator,
    Sampler,
    Size,
    Table,
    TableTasks,
    Task,
    drawn_ahead,
    make_sampler,
    read_table,
)
from ..data.columns import COLUMNS, SUFFIXES, is_table, names_in
from ..data.pictures import draw_predictions
from ..models.transformer_np import TransformerNP, TransformerNPConfig
from ..training import RunFolder, Trainer, captures
from ..training.evaluations import part_size
from ..training.processes import leaving
from ..training.reporting.report import PREDICTIONS, write_report
from .commands import (
    check_device,
    join_others,
    open_run,
    optimizer_of,
    results_in,
    score_table,
    train,
    usage_errors,
)
from .dry_run import Counted, counted, step_operations, tell
from .options import LARGEST_SEED
from .presets import TRANSFORMER_NP, TransformerNPPreset
from .run import LATER, Run
from .settings import TransformerNPSettings
from .step_memory import BatchSize
from .weights import begin

COVERAGE = "held_out_coverage_"
# Every run on the same kind of data is scored on the same tasks; no run can train on them.
EVALUATION_SEED = LARGEST_SEED + 1


class TransformerNPRun(TransformerNPSettings, Run):
    """A `Run` of TransformerNP."""

    presets: ClassVar = TRANSFORMER_NP
    later: ClassVar = LATER | {"gradient_accumulation_steps": 1, "inputs": None, "output": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {"--inputs": self.inputs, "--output": self.output}
        if is_table(self.data):
            missing = [name for name, columns in named.items() if columns is None]
            if missing:
                raise ValueError(
                    f"--data {self.data} wants the names of its columns in --inputs and --output; "
                    f"got no {' and no '.join(missing)}"
                )
            names_in(str(self.inputs))
            return
        if self.data not in DATA_NAMES:
            raise ValueError(
                f"data must be one of {DATA_NAMES}, or a file that ends in "
                f"{' or '.join(SUFFIXES)}; got {self.data!r}"
            )
        given = [name for name, columns in named.items() if columns is not None]
        if given:
            raise ValueError(
                f"--inputs and --output name columns of a file in --data; got {given[0]} beside "
                f"--data {self.data}"
            )

    @property
    def label(self) -> str:
        return Path(self.data).stem

    @cached_property
    def table(self) -> Table | None:
        """What it trains on, if that is a file; read once."""
        if not is_table(self.data):
            return None
        return read_table(self.data, names_in(str(self.inputs)), str(self.output))

    @property
    def files(self) -> dict[str, bytes]:
        return {} if self.table is None else {COLUMNS: self.table.columns.to_json()}

    @property
    def x_width(self) -> int:
        """Coordinates of an input."""
        if is_table(self.data):
            return len(names_in(str(self.inputs)))
        return self.sampler(held_out=True).x_width

    def check_shares(self, count: int) -> None:
        if self.parallel != "context":
            super().check_shares(count)
            return
        if self.ragged or self.pad:
            raise ValueError(
                "--parallel context shares the rows of tasks of one size; got "
                + ("--ragged" if self.ragged else "--pad")
            )
        for flag, text in (
            ("--context-size", self.context_size),
            ("--target-size", self.target_size),
        ):
            size = None if text is None else Size.parse(text)
            if size is None or not size.is_one or size.high % count:
                raise ValueError(
                    f"--parallel context wants one {flag}, as many rows for each of {count} "
                    f"processes; got {text or 'that of the data'}"
                )

    def sampler(self, *, held_out: bool = False, padded: bool = False) -> Sampler:
        context_size, target_size = (
            None if text is None else Size.parse(text)
            for text in (self.context_size, self.target_size)
        )
        options: dict[str, Any] = {
            "held_out": held_out,
            "context_size": context_size,
            "target_size": target_size,
            # Scores are of whole batches of one size, whatever the training shows.
            "ragged": self.ragged and not held_out,
            "padded": padded,
            "device": self.device,
            "seed": EVALUATION_SEED if held_out else self.seed,
        }
        if self.table is not None:
            return TableTasks(table=self.table, **options)
        return make_sampler(self.data, **options)

    def source(self, *, padded: bool) -> Sampler | DrawnAhead | DrawnInTurn:
        """Of the training's batches."""
        sampler = self.sampler(padded=padded)
        return sampler if self.ahead is None else drawn_ahead(sampler, self.ahead)

    def part_tasks(self, preset: TransformerNPPreset) -> int:
        """What evaluations before the last one read of a preset's held-out tasks."""
        sizes = {"whole": preset.evaluation_tasks, "each": preset.evaluation_batch_size}
        trained = self.batch_size
        return part_size(self.training(), share=self.eval_share, trained=trained, **sizes)

    def model(self, x_width: int) -> TransformerNP:
        torch.manual_seed(self.seed)
        return self.built(x_width).to(self.device)

    def shape(self, x_width: int) -> TransformerNPConfig:
        return TransformerNPConfig(
            **TRANSFORMER_NP[self.preset].architecture,
            x_width=x_width,
            norm=self.norm,
            scale=self.scale,
            frequencies=self.frequencies,
            indicator=self.indicator,
            checkpointing=self.checkpointing,
        )

    def built(self, x_width: int) -> TransformerNP:
        """The model of tasks with so many coordinates, on the default device."""
        return TransformerNP(self.shape(x_width), backend=self.backend)


def negative_log_likelihood(model: TransformerNP, task: Task) -> Tensor:
    """The loss of a neural process: minus the mean over B, N and outputs of log p(y).

    The tasks of a batch have one number of targets, so that the mean over processes is that over
    all.
    """
    rows = task.x_context, task.y_context, task.x_target
    lengths = task.context_lengths, task.target_lengths
    return model(*rows, *lengths, y_target=task.y_target, group=task.group)


def calibration_of(result: Evaluation) -> dict[str, float]:
    """Coverage and PIT as a line of metrics has them."""
    coverage = zip(LEVELS, result.coverage, strict=True)
    found = {f"{COVERAGE}{100.0 * level:.0f}": share for level, share in coverage}
    return found | {f"held_out_pit_{number}": share for number, share in enumerate(result.pit)}


@leaving()
def train_transformer_np(flags: dict[str, Any]) -> None:
    """Begin or continue the run that the flags ask for, and report how well it predicts.

    Raises:
        typer.BadParameter: it cannot be served.
        typer.Exit: it was stopped.
    """
    resumed, dry = "resume" in flags, flags.pop("dry_run", False)
    with usage_errors():
        run, folder = open_run(TransformerNPRun, flags)
    # What is left of the flags is other than in the file.
    with usage_errors(folder.config_file if resumed and not flags else None):
        processes, folder, console = join_others(run, folder)
        check_device(run)
        if dry:
            _tell(console, run)
            return
        held_out = run.sampler(held_out=True)
        operations = step_operations(run, lambda: _forward(run)[0])
        model = run.model(held_out.x_width)
        run = begin(model, run, folder, resumed=resumed, processes=processes)
        parameters = model.parameter_count()
        processes.shard(model, run.blocks(model))
        training = run.training()
        chosen = optimizer_of(run, model)
        captured = captures(chosen, training, processes)
        source = run.source(padded=captured if run.pad is None else run.pad)
    preset = TRANSFORMER_NP[run.preset]
    batch_size = preset.evaluation_batch_size
    evaluator = Evaluator(held_out, batch_size=batch_size, processes=processes)

    def evaluation(tasks: int, *, last: bool = False) -> dict[str, float]:
        result = evaluator.score(model, tasks // batch_size, compute=trainer.stepper.scored)
        return {
            "held_out_log_likelihood": result.log_likelihood,
            "held_out_standard_error": result.standard_error,
            "reference_log_likelihood": result.reference,
            "held_out_crps": result.crps,
            "held_out_tasks": tasks,
            **(calibration_of(result) if last else {}),
        }

    parts = model, source, negative_log_likelihood, chosen, training, folder
    shared: dict[str, Any] = dict(choices=run.choices, processes=processes)
    trainer = Trainer(
        *parts,
        evaluate=lambda: evaluation(preset.evaluation_tasks, last=True),
        evaluate_part=lambda: evaluation(run.part_tasks(preset)),
        operations=operations,
        console=console,
        **shared,
    )
    console.print(
        f"TransformerNP, {parameters:,} parameters, {run.data}, {run.device}, "
        f"{run.precision}, into {folder.path}",
        highlight=False,
    )
    train(trainer, run, folder, resumed=resumed)
    model.eval()
    picture = draw_predictions(model, held_out)
    if not processes.is_main:
        return
    with usage_errors():
        folder.draw(PREDICTIONS, picture)
        write_report(folder)
    _report(console, folder, held_out.reference)


def _tell(console: Console, run: TransformerNPRun) -> None:
    """What the run would take."""
    run.source(padded=False)
    forward, shape = _forward(run, with_memory=True)
    columns = shape.layers, shape.width
    size = BatchSize(rows=forward.rows, unit="task", units=run.batch_size, layer_columns=columns)
    tell(console, run, "TransformerNP", forward, size)


def _forward(
    run: TransformerNPRun, *, with_memory: bool = False
) -> tuple[Counted, TransformerNPConfig]:
    """A pass of a batch that is drawn for it, and the model's shape."""
    task = run.sampler().sample(run.batch_size)
    with torch.device("meta"):
        model = run.built(task.x_target.shape[-1])
        batch = task.to("meta")
        optimizer = optimizer_of(run, model) if with_memory else None
        loss = lambda: negative_log_likelihood(model, batch)  # noqa: E731
        forward = counted(model, loss, task.tokens, optimizer=optimizer)
    return forward._replace(parameters=model.parameter_count()), model.config


def _report(console: Console, folder: RunFolder, reference: str) -> None:
    lines = [line for line in folder.read_metrics() if "held_out_log_likelihood" in line]
    scores = [
        (name, line["held_out_log_likelihood"], f"{line['held_out_standard_error']:.4f}")
        for name, line in (("before training", lines[0]), ("after training", lines[-1]))
    ]
    scores.append((reference, lines[-1]["reference_log_likelihood"], ""))
    columns = ("mean", "standard error")
    console.print(score_table("held-out log-likelihood per target, nats", columns, scores))
    coverage = [(name, x) for name, x in lines[-1].items() if name.startswith(COVERAGE)]
    if coverage:
        told = ", ".join(f"{name.removeprefix(COVERAGE)} % {share:.1%}" for name, share in coverage)
        console.print(f"held-out targets in central intervals of {told}", highlight=False)
    results_in(console, folder)
