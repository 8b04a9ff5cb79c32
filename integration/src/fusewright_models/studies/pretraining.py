"""Trains the network that `TransformerNPRegressor` has where it is given none.

    python -m fusewright_models.studies.pretraining --minutes 9.5 --out runs/regressor

is ``fusewright-train transformer-np`` with the flags of `RECIPE`, on the data "prior", and with as
many steps as end within the minutes, of which compilation and evaluations have their part: the time
of a step is taken first, at contexts of sizes that are spread as those of the data are. It leaves
the run in OUT/run, its weights of 16 bits in OUT/regressor, as ``fusewright-train export --dtype
float16`` writes them, and all evaluations in OUT/pretraining-ENVIRONMENT.csv with their curve
beside it.

A run that is stopped before its end goes on by ``fusewright-train transformer-np --resume
OUT/run``, and what is to be left then is written by ``--minutes 0``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from fusewright.norm import warm_up
from matplotlib.figure import Figure
from rich.console import Console

from .. import figures
from ..bench.results import environment_name
from ..cli.commands import optimizer_of, usage_errors
from ..cli.export import export_run
from ..cli.transformer_np import TransformerNPRun, negative_log_likelihood, train_transformer_np
from ..data import DrawnAhead, PriorTasks
from ..data.prior.tasks import TARGETS
from ..devices import checked_device, wait_for
from ..training import RunFolder, Trainer
from .results import write

# Of `fusewright-train transformer-np`.
RECIPE: dict[str, Any] = {
    "preset": "regressor",
    "data": "prior",
    "optimizer": "muon",
    "frequencies": 4,
    "indicator": True,
    "ahead": 16,
    "log_every": 200,
    "checkpoint_every": "1m",
}
# Evaluations of a run.
POINTS = 10
# Sizes of contexts at which steps are timed; steps of each before that, for compilation and
# capture, and timed ones: two draws of the recipe's.
SIZES, WARM, TIMED = 8, 8, 32
# Seconds of what is neither compiled nor trained: captures, the first evaluation and the last one;
# and the share of the rest that is not steps as they were timed: evaluations between, and the 8 %
# that a step of 73,000 took longer.
SPARE, OTHERS = 25.0, 0.12
FORMATS = {"seconds": ".1f", "loss": ".4f"}
DTYPE = "float16"


@dataclass(frozen=True)
class Point:
    """One evaluation: a row of the result file.

    Attributes:
        step: of ``steps``.
        seconds: that its steps took, evaluations not counted.
        loss: of the steps since the last log point; NaN before the first.
        log_likelihood: nats per held-out target.
        standard_error: of it, over tasks.
        reference: of the normal distribution of the context's y, on the same targets.
        crps: in the context's standard deviations.
        tasks: that it was scored on.
    """

    step: int
    steps: int
    seconds: float
    loss: float
    log_likelihood: float
    standard_error: float
    reference: float
    crps: float
    tasks: int


def run_of(device: str, **more: Any) -> TransformerNPRun:
    return TransformerNPRun.from_flags(RECIPE | {"device": device} | more)


class OneSize(PriorTasks):
    """Tasks of one size, padded as those of all sizes are."""

    size = 0

    def draw_sizes(self) -> tuple[int, int]:
        return self.size, TARGETS


def seconds_of_a_step(run: TransformerNPRun) -> float:
    """The mean over sizes of contexts, each at the middle of an equal share of the draws; of a step
    with its data, by the host's clock.
    """
    total = 0.0
    for number in range(SIZES):
        sampler = OneSize(padded=True, device=run.device, seed=run.seed)
        sampler.size = sampler.size_at((number + 0.5) / SIZES)
        total += _timed(run, sampler)
    return total / SIZES


def _timed(run: TransformerNPRun, sampler: OneSize) -> float:
    model = run.model(run.x_width)
    source = DrawnAhead(sampler, run.ahead or 1)
    parts = source, negative_log_likelihood, optimizer_of(run, model), run.training()
    trainer = Trainer(model, *parts, None, console=Console(file=StringIO()))
    batch = source.sample(run.batch_size)
    with trainer.stepper.autocast():
        warm_up(
            model.loss,
            *(batch.x_context, batch.y_context, batch.x_target, batch.y_target),
            *(batch.context_lengths, batch.target_lengths),
        )
    trainer.run(until=WARM)
    wait_for(trainer.device)
    start = time.perf_counter()
    trainer.run(until=WARM + TIMED)
    wait_for(trainer.device)
    return (time.perf_counter() - start) / TIMED


def steps_within(seconds: float, of_a_step: float) -> float:
    """How many end in so many seconds, with what else is done beside them."""
    return (1.0 - OTHERS) * (seconds - SPARE) / of_a_step


def points_of(folder: RunFolder) -> list[Point]:
    """The evaluations of a run."""
    steps = folder.read_config()["steps"]
    seconds, loss, points = 0.0, float("nan"), []
    for line in folder.read_metrics():
        if "loss" in line:
            seconds, loss = seconds + line["seconds"], line["loss"]
            continue
        names = "held_out_log_likelihood", "held_out_standard_error", "reference_log_likelihood"
        scores = [line[name] for name in (*names, "held_out_crps", "held_out_tasks")]
        points.append(Point(line["step"], steps, seconds, loss, *scores))
    return points


def draw(points: list[Point]) -> Figure:
    """The log-likelihood over the seconds of the run."""
    heading = "TransformerNP pretrained on drawn tasks, higher is better"
    figure, (axes,) = figures.panels([""], heading=heading)
    seconds = [point.seconds for point in points]
    network = [point.log_likelihood for point in points]
    axes.plot(seconds, network, marker=".", color=figures.CURVES[0], label="network")
    normal = [point.reference for point in points]
    axes.plot(seconds, normal, color=figures.NEUTRAL, label="normal, of the context's y")
    figures.dress(axes, x="seconds of steps", y="held-out log-likelihood, nats per target")
    figures.legend(figure)
    return figure


def main(
    minutes: Annotated[float, typer.Option(min=0.0, help="Of everything; 0 trains nothing.")],
    out: Annotated[Path, typer.Option(help="Folder of the run and of what is left of it.")],
    device: Annotated[str, typer.Option()] = "cuda",
) -> None:
    """Train, and leave the weights and their curve."""
    console, begun = Console(), time.perf_counter()
    with usage_errors():
        where = checked_device(device)
    folder = RunFolder(out / "run")
    if minutes:
        run = run_of(device)
        taken = seconds_of_a_step(run)
        found_in = time.perf_counter() - begun
        steps = max(POINTS, int(steps_within(60.0 * minutes - found_in, taken)))
        console.print(
            f"{1e3 * taken:.2f} ms a step, found in {found_in:.0f} s: {steps} steps",
            highlight=False,
        )
        more = {"steps": steps, "eval_every": max(1, steps // POINTS), "device": device}
        train_transformer_np(RECIPE | more | {"out": folder.path})
    points = points_of(folder)
    file = out / f"pretraining-{environment_name(where)}.csv"
    write(points, file, draw, number=".5f", formats=FORMATS)
    export_run(folder.path, out / "regressor", push=None, dtype=DTYPE)


if __name__ == "__main__":
    typer.run(main)
