"""Comparisons of optimizers as a table: of what ``fusewright_models.compare_optimizers`` wrote.

``report.py`` puts it between the marks of the README.
"""

from __future__ import annotations

import csv
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

COLUMNS = ["model", "optimizer", "phase", "lr", "seed", "step", "loss", "score", "seconds"]
MODELS = {
    "titan-mac": "TitanMAC, held-out bits per byte",
    "transformer-np": "TransformerNP on digits, minus held-out log-likelihood in nats per target",
}
AGAINST = "adamw"
HEADER = (
    "optimizer",
    "peak rate",
    "ended",
    "score",
    "deviation",
    f"seeds better than {AGAINST}",
    "seconds",
)
TOLD = (
    "{model} after {steps} steps from each of {seeds} seeds, less is better: "
    "[{name}](results/{name}). Peak rates are the best of {rates} each, by runs from other seeds, "
    "{grid_seeds} a rate; a rate at an end of its grid is marked *. Scores are of the seeds whose "
    "runs ended with a finite one. Seconds are of all steps of a run."
)


class Runs(NamedTuple):
    """Of one optimizer, with the rate that its grid chose.

    Attributes:
        lr: that rate.
        rates: of the grid.
        grid_seeds: how many runs chose among them, of each.
        seeds: how many runs began.
        scores: at the last step, by seed; without seeds whose run did not come there, or not with a
            finite score.
        seconds: mean of those runs.
    """

    lr: float
    rates: list[float]
    grid_seeds: int
    seeds: int
    scores: dict[int, float]
    seconds: float

    @property
    def at_end(self) -> bool:
        return len(self.rates) > 1 and self.lr in (min(self.rates), max(self.rates))


def read(path: Path) -> tuple[str, int, dict[str, Runs]] | None:
    """Model, steps and runs by optimizer; None where the columns are others."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        if reader.fieldnames != COLUMNS or not rows:
            return None
    steps = max(int(row["step"]) for row in rows)
    found = {}
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        mine = [row for row in rows if row["optimizer"] == optimizer]
        runs = [row for row in mine if row["phase"] == "run"]
        last = [row for row in runs if int(row["step"]) == steps]
        ends = [row for row in last if isfinite(float(row["score"]))]
        grid = [row for row in mine if row["phase"] == "grid"]
        found[optimizer] = Runs(
            float(runs[0]["lr"]),
            sorted({float(row["lr"]) for row in grid}),
            len({row["seed"] for row in grid}),
            len({row["seed"] for row in runs}),
            {int(row["seed"]): float(row["score"]) for row in ends},
            mean(float(row["seconds"]) for row in ends) if ends else 0.0,
        )
    return rows[0]["model"], steps, found


def lines(found: dict[str, Runs]) -> list[tuple[str, ...]]:
    """The best mean first; what did not come to its end from any seed last."""
    against = found[AGAINST].scores if AGAINST in found else {}

    def line(name: str, runs: Runs) -> tuple[str, ...]:
        rate = f"{runs.lr:g}{' *' if runs.at_end else ''}"
        scores = list(runs.scores.values())
        ended = f"{len(scores)} of {runs.seeds}"
        if not scores:
            return name, rate, ended, "not finite", "", "", ""
        better = sum(score < against.get(seed, score) for seed, score in runs.scores.items())
        spread = f"{stdev(scores):.4f}" if len(scores) > 1 else ""
        told = "" if name == AGAINST or not against else f"{better} of {len(scores)}"
        return name, rate, ended, f"{mean(scores):.4f}", spread, told, f"{runs.seconds:.1f}"

    def place(name: str) -> float:
        scores = found[name].scores.values()
        return mean(scores) if scores else float("inf")

    return [line(name, found[name]) for name in sorted(found, key=place)]


def parts(folder: Path) -> list[str]:
    """Paragraph, picture and table of every comparison in ``results/``."""
    told = []
    for path in files(folder):
        read_of = read(path)
        assert read_of is not None
        model, steps, found = read_of
        seeds = max(runs.seeds for runs in found.values())
        rates = max(len(runs.rates) for runs in found.values())
        grid_seeds = max(runs.grid_seeds for runs in found.values())
        name = MODELS[model]
        counts = dict(steps=steps, seeds=seeds, rates=rates, grid_seeds=grid_seeds)
        told.append(TOLD.format(model=name, name=path.name, **counts))
        told.append(f"![{name}, by optimizer](results/{path.stem}.png)")
        rule = ("---", *("---:",) * (len(HEADER) - 1))
        table = [HEADER, rule, *lines(found)]
        told.append("\n".join("| " + " | ".join(line) + " |" for line in table))
    return told


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("results/optimizers-*.csv")) if read(path)]
