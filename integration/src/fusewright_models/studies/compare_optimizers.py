"""Which optimizer helps? All of them on one model: equal steps, several seeds, rates from a grid.

    python -m fusewright_models.studies.compare_optimizers --out integration/results

trains TitanMAC `tiny` on bytes of the standard library, or a TransformerNP on digits, with every
optimizer of the training program. Each one's peak rate is the best of a small grid by the mean of
its last held-out scores on some seeds, none of them not finite; with that rate it is trained from
each of other seeds: a single run would choose rates at the edge of what trains. All evaluations,
those of the grid too, go to optimizers-MODEL-ENVIRONMENT.csv, or of a preset that is not the
default to optimizers-MODEL-PRESET-ENVIRONMENT.csv, mean curves with their spread over the seeds to
a picture beside it. Weights and data of a seed are the same for all, and so are the steps of a
file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from fusewright.attention import Backend
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from .. import figures
from ..bench.results import environment_name
from ..cli.commands import optimizer_of, usage_errors
from ..cli.presets import TITAN_MAC_PRESETS, TRANSFORMER_NP
from ..cli.run import Run
from ..cli.titan_mac import TitanMACRun, next_token_loss
from ..cli.transformer_np import TransformerNPRun, negative_log_likelihood
from ..data import evaluate
from ..devices import checked_device
from ..text import evaluate_text
from ..training import OPTIMIZER_NAMES, OptimizerName, Trainer, default_rate
from .results import rows_before, write

ModelName = Literal["titan-mac", "transformer-np"]
PRESETS: dict[ModelName, str] = {"titan-mac": "tiny", "transformer-np": "demo"}
SCORES: dict[str, str] = {
    "titan-mac": "held-out bits per byte",
    "transformer-np": "minus held-out log-likelihood, nats per target",
}
GRID = "0.25,0.5,1,2,4"
# No seed of the comparison is this one or follows it.
GRID_SEED = 2**31
POINTS = 6
# Of the standard library; the tiny model reads fewer in a comparison.
TRAINING_TOKENS = 2**22
EVALUATION_WINDOWS, EVALUATION_BATCHES, EVALUATION_TASKS = 32, 8, 64
Phase = Literal["grid", "run"]


@dataclass(frozen=True)
class Point:
    """One evaluation: a row of the result file.

    Attributes:
        phase: "grid" where the rate is chosen, "run" of what is compared.
        loss: mean of the steps since the evaluation before; NaN at step 0 and where all were
            skipped.
        score: held out; less is better, whatever the model.
        seconds: of all steps so far, evaluations left out.
    """

    model: str
    optimizer: str
    phase: Phase
    lr: float
    seed: int
    step: int
    loss: float
    score: float
    seconds: float


FORMATS = {"lr": "g", "loss": ".5f", "score": ".5f", "seconds": ".3f"}


class Subject(NamedTuple):
    """A model and its data.

    Attributes:
        run: of these flags.
        build: of a run: model, source of batches, loss function and what scores the model.
    """

    run: Callable[[dict[str, Any]], Run]
    build: Callable[[Any], tuple[nn.Module, Any, Callable[[Any, Any], Tensor], Callable[[], float]]]


def subject_of(model: ModelName, shared: dict[str, Any]) -> Subject:
    """The data is read once; ``shared`` are flags of all runs."""
    if model == "transformer-np":
        # One shape for all batches, so that a step is captured once.
        flags = shared | {"ragged": True}
        return Subject(lambda more: TransformerNPRun.from_flags(flags | more), _build_transformer)
    flags = shared | {"dataset_tokens": TRAINING_TOKENS}
    corpus = TitanMACRun.from_flags(flags).corpus()
    return Subject(
        lambda more: TitanMACRun.from_flags(flags | more),
        partial(_build_titan_mac, corpus=corpus),
    )


def _build_titan_mac(run: TitanMACRun, corpus: Any) -> tuple:
    model = run.model(corpus.tokenizer.vocab_size)

    def score() -> float:
        return evaluate_text(
            model,
            corpus.held_out,
            length=run.seq_len,
            batch_size=EVALUATION_WINDOWS,
            text_bytes=len(corpus.held_out_text),
        ).bits_per_byte

    return model, run.windows(corpus), next_token_loss, score


def _build_transformer(run: TransformerNPRun) -> tuple:
    sampler, held_out = run.sampler(held_out=False), run.sampler(held_out=True)
    model = run.model(sampler.x_width)

    def score() -> float:
        sizes = {"batches": EVALUATION_BATCHES, "batch_size": EVALUATION_TASKS}
        return -evaluate(model, held_out, **sizes).log_likelihood

    return model, sampler, negative_log_likelihood, score


def train(subject: Subject, flags: dict[str, Any], phase: Phase) -> list[Point]:
    """One run; its points end where something was not finite."""
    run = subject.run(flags)
    model, source, loss_function, score = subject.build(run)
    points: list[Point] = []
    loss, seconds = nan, 0.0

    def observe(line: dict[str, Any]) -> None:
        nonlocal loss, seconds
        if "score" in line:
            of_run = (run.model_name, run.optimizer, phase, run.lr, flags["seed"])
            points.append(Point(*of_run, line["step"], loss, line["score"], seconds))
        else:
            loss, seconds = line.get("loss", nan), seconds + line["seconds"]

    told: dict[str, Any] = {"evaluate": lambda: {"score": score()}, "observe": observe}
    parts = model, source, loss_function, optimizer_of(run, model), run.training(), None
    trainer = Trainer(*parts, console=Console(quiet=True), **told)
    with suppress(FloatingPointError):
        trainer.run()
    return points


def last_score(points: list[Point], steps: int) -> float:
    """Infinite of a run that did not come to its end, or had a score that was not finite."""
    ended = bool(points) and points[-1].step == steps
    return points[-1].score if ended and all(isfinite(p.score) for p in points) else inf


def compare(
    subject: Subject,
    flags: dict[str, Any],
    rates: Iterable[float],
    seeds: int,
    grid_seeds: int,
    say: Callable[[str], None],
) -> list[Point]:
    """The grid of one optimizer and, with the rate that it chose, its runs.

    ``flags`` are of all of them, optimizer and steps among them.
    """
    optimizer, steps = flags["optimizer"], flags["steps"]
    every = max(1, steps // POINTS)
    flags = flags | {"log_every": every, "eval_every": every}

    def trained(lr: float, seed: int, phase: Phase) -> list[Point]:
        points = train(subject, flags | {"lr": lr, "seed": seed}, phase)
        say(f"{optimizer}, {phase}, lr {lr:g}, seed {seed}: {last_score(points, steps):.4f}")
        return points

    found: list[Point] = []
    sums: dict[float, float] = {}
    for lr in rates:
        runs = [trained(lr, GRID_SEED + number, "grid") for number in range(grid_seeds)]
        sums[lr] = sum(last_score(points, steps) for points in runs)
        found += [point for points in runs for point in points]
    best = min(sums, key=sums.__getitem__)
    for seed in range(seeds):
        found += trained(best, seed, "run")
    return found


def draw(points: list[Point]) -> Figure:
    """Mean scores over steps, the spread from the best seed to the worst around them."""
    model = points[0].model
    heading = f"{model} by optimizer: mean and spread of the seeds, lower is better"
    figure, (axes,) = figures.panels([""], heading=heading, height=4.4)
    runs = [point for point in points if point.phase == "run" and point.step > 0]
    names = dict.fromkeys(point.optimizer for point in runs)
    for optimizer, colour in zip(names, itertools.cycle(figures.CURVES), strict=False):
        mine = [point for point in runs if point.optimizer == optimizer]
        steps = sorted({point.step for point in mine})
        scores = [[point.score for point in mine if point.step == step] for step in steps]
        means = [sum(some) / len(some) for some in scores]
        label = f"{optimizer}, lr {mine[0].lr:g}"
        axes.plot(steps, means, color=colour, marker="o", markersize=3, label=label)
        low, high = [min(some) for some in scores], [max(some) for some in scores]
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0.0)
    figures.dress(axes, x="step", y=SCORES[model])
    figures.legend(figure)
    return figure


def main(
    model: Annotated[ModelName, typer.Option()] = "titan-mac",
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    optimizers: Annotated[str, typer.Option(help="Names, with commas between them.")] = ",".join(
        OPTIMIZER_NAMES
    ),
    seeds: Annotated[int, typer.Option(min=1)] = 5,
    grid_seeds: Annotated[int, typer.Option(min=1, help="Of every rate of the grid.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Of every run.")] = 600,
    grid: Annotated[str, typer.Option(help="Peak rates over each one's default.")] = GRID,
    preset: Annotated[str | None, typer.Option(help="Default: tiny; demo of the digits.")] = None,
    optimizer_weights: Annotated[
        str | None, typer.Option(help="Of the optimizer learned: a safetensors file.")
    ] = None,
    device: Annotated[str, typer.Option()] = "cpu",
    backend: Annotated[Backend, typer.Option()] = "auto",
) -> None:
    """Train a model with every optimizer; write all scores and their curves."""
    console = Console()
    presets: dict[str, Any] = TITAN_MAC_PRESETS if model == "titan-mac" else TRANSFORMER_NP
    with usage_errors():
        where, name = checked_device(device), preset or PRESETS[model]
        if name not in presets:
            raise ValueError(f"preset must be one of {tuple(presets)}; got {name!r}")
        factors = [float(text) for text in grid.split(",")]
        if not all(isfinite(factor) and factor > 0.0 for factor in factors):
            raise ValueError(f"--grid wants positive numbers; got {grid}")
        subject = subject_of(model, {"preset": name, "device": device, "backend": backend})
        # Rows of two presets are no comparison.
        label = model if name == PRESETS[model] else f"{model}-{name}"
        file = out / f"optimizers-{label}-{environment_name(where)}.csv"
        chosen = [name for name in OPTIMIZER_NAMES if name in optimizers.split(",")]
        if unknown := set(optimizers.split(",")) - set(chosen):
            raise ValueError(f"optimizers are {OPTIMIZER_NAMES}; got {', '.join(sorted(unknown))}")
        # All eager or all replayed, as their seconds are compared.
        shared = {"steps": steps, "capture": where.type == "cuda"}
        flags: dict[OptimizerName, dict[str, Any]] = {
            each: {"optimizer": each} | shared for each in chosen
        }
        if "learned" in flags and optimizer_weights is not None:
            flags["learned"]["optimizer_weights"] = optimizer_weights
        adamws = presets[name].lr
        rates = {
            each: [factor * default_rate(each, adamws) for factor in factors] for each in chosen
        }
        for each in chosen:
            # What cannot be had is said before anything is trained.
            for rate in rates[each]:
                subject.run(flags[each] | {"lr": rate})
            optimizer_of(subject.run(flags[each]), nn.Linear(1, 1, device=where))
        kept = [point for point in rows_before(Point, file) if point.optimizer not in chosen]
        if kept and (theirs := max(point.step for point in kept)) != steps:
            raise ValueError(
                f"wanted runs of {steps} steps beside those of this comparison in {file}; got runs "
                f"of {theirs}: give --steps {theirs}, or another folder"
            )
    for each in chosen:
        say = partial(console.print, highlight=False)
        kept += compare(subject, flags[each], rates[each], seeds, grid_seeds, say)
        # What has been trained is kept, whatever comes.
        write(kept, file, draw, formats=FORMATS)
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
