"""`TransformerNPRegressor` without training, beside regressors that are fitted, on data that was
not made here: what scikit-learn ships.

    python -m fusewright_models.studies.regressors --out integration/results

The data is that of `regression_data`, the peers and what they say of y are those of
`regression_peers`. Everything is scored as a distribution of y: log-likelihood, of y over its
standard deviation in the rows that are known; the share of y in the central interval of 90 %; RMSE;
seconds of fit and prediction, of one processor. Rows that are measured again replace their like in
the result file.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from .. import figures
from ..bench.results import environment_name
from ..cli.commands import usage_errors
from .regression_data import SPLITS, Split, data_sets
from .regression_peers import OURS, PEERS, Ours, Said
from .results import beside, rows_before, write

FORMATS = {"rmse": ".5g", "log_likelihood": ".4f", "coverage_90": ".3f", "seconds": ".3f"}


@dataclass(frozen=True)
class Score:
    """A row of the result file.

    Attributes:
        data: the data set.
        rows: that are known.
        columns: of them.
        split: its number.
        model: who predicts.
        rmse: in the units of y.
        log_likelihood: nats per row, of y over its standard deviation in the rows that are known.
        coverage_90: share of y in the central interval of 90 %.
        seconds: of fit and prediction, of one processor.
    """

    data: str
    rows: int
    columns: int
    split: int
    model: str
    rmse: float
    log_likelihood: float
    coverage_90: float
    seconds: float


def score(
    data: str, number: int, split: Split, model: str, predict: Callable[[Split], Said]
) -> Score:
    start = time.process_time()
    with warnings.catch_warnings():
        # A length at its bound is that of a column that does not matter.
        warnings.simplefilter("ignore", ConvergenceWarning)
        said = predict(split)
    seconds = time.process_time() - start
    inside = (said.low <= split.y_asked) & (split.y_asked <= said.high)
    rows, columns = split.x.shape
    return Score(
        data,
        rows,
        columns,
        number,
        model,
        float(np.mean((said.mean - split.y_asked) ** 2) ** 0.5),
        float(said.log_p.mean() + np.log(split.y.std())),
        float(inside.mean()),
        seconds,
    )


class Standing(NamedTuple):
    """How ours is beside the best of all on a data set, in log-likelihood.

    Attributes:
        means: of each model over the splits.
        best: its name.
        behind: the mean over splits of the best's less ours.
        error: its standard error, over splits taken as independent.
    """

    means: dict[str, float]
    best: str
    behind: float
    error: float

    @property
    def level(self) -> bool:
        """Whether ours is the best, or within a standard error of it."""
        return self.best == OURS or self.behind <= self.error


def standing(scores: Iterable[Score]) -> Standing | None:
    """Of the scores of one data set; None without ours, or without peers."""
    by_model: dict[str, dict[int, float]] = {}
    for each in scores:
        by_model.setdefault(each.model, {})[each.split] = each.log_likelihood
    if OURS not in by_model or len(by_model) < 2:
        return None
    means = {name: float(np.mean([*found.values()])) for name, found in by_model.items()}
    best = max(means, key=lambda name: means[name])
    both = sorted(by_model[best].keys() & by_model[OURS].keys())
    behind = np.array([by_model[best][n] - by_model[OURS][n] for n in both])
    error = float(behind.std(ddof=1) / len(both) ** 0.5) if len(both) > 1 else 0.0
    return Standing(means, best, float(behind.mean()), error)


def grouped(scores: Iterable[Score]) -> dict[str, list[Score]]:
    """By data set, in their order."""
    found: dict[str, list[Score]] = {}
    for each in scores:
        found.setdefault(each.data, []).append(each)
    return found


def models_of(scores: Iterable[Score]) -> list[str]:
    known = {each.model for each in scores}
    return [name for name in (OURS, *PEERS) if name in known]


def summary(scores: list[Score]) -> Table:
    """Mean log-likelihoods, and where ours stands."""
    models = models_of(scores)
    table = Table("data", *models, "best", "behind", title="log-likelihood, nats per row")
    for data, some in grouped(scores).items():
        values = {
            name: [each.log_likelihood for each in some if each.model == name] for name in models
        }
        cells = [f"{np.mean(each):.3f}" if each else "" for each in values.values()]
        found = standing(some)
        told = (
            ("", "") if found is None else (found.best, f"{found.behind:.3f} ± {found.error:.3f}")
        )
        table.add_row(data, *cells, *told)
    return table


def draw(scores: list[Score]) -> Figure:
    """How far each is from the best of each data set, and the seconds of all over their rows."""
    titles = ["log-likelihood behind the best, lower is better", "time, lower is better"]
    heading = "Regression: TransformerNP pretrained on drawn tasks (fusewright) and others"
    figure, (left, right) = figures.panels(
        titles, heading=heading, height=6.6, width_ratios=[1.4, 1.0]
    )
    sets = grouped(scores)
    for model, colour in zip(models_of(scores), itertools.cycle(figures.CURVES), strict=False):
        places, behind, rows, seconds = [], [], [], []
        for place, some in enumerate(sets.values()):
            mine = [each for each in some if each.model == model]
            if not mine:
                continue
            means = [
                np.mean([each.log_likelihood for each in some if each.model == other])
                for other in models_of(some)
            ]
            places.append(-place)
            behind.append(max(means) - np.mean([each.log_likelihood for each in mine]))
            rows.append(mine[0].rows)
            seconds.append(np.median([each.seconds for each in mine]))
        style: dict[str, Any] = {"color": colour, "label": model}
        style |= {"marker": "D" if model == OURS else "o", "linestyle": "none", "markersize": 5}
        style["zorder"] = 3 if model == OURS else 2
        left.plot(behind, places, **style)
        right.plot(rows, seconds, **style)
    left.set_yticks([-place for place in range(len(sets))], [*sets])
    left.set_xscale("symlog", linthresh=0.1)
    left.set_xlim(-0.01, 1.3 * left.dataLim.xmax)
    figures.dress(left, x="nats per row behind the best")
    figures.dress(right, x="rows that are known", y="seconds of fit and prediction")
    right.set_xscale("log")
    right.set_yscale("log")
    figures.legend(figure, columns=5)
    return figure


def merged(before: list[Score], after: list[Score], order: list[str]) -> list[Score]:
    """All of them, each as it was measured last, by data set, split and model."""
    models = [OURS, *PEERS]
    scores = beside(after, before, lambda each: (each.data, each.split, each.model))

    def place(each: Score) -> tuple[int, int, int]:
        return order.index(each.data), each.split, models.index(each.model)

    return sorted((each for each in scores if each.data in order), key=place)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    only: Annotated[str | None, typer.Option(help="Data sets whose names begin so.")] = None,
    models: Annotated[str, typer.Option(help="Of them.")] = ",".join([OURS, *PEERS]),
    model: Annotated[
        str | None, typer.Option(help="Of ours; the package's own by default.")
    ] = None,
    splits: Annotated[int, typer.Option(min=1, max=SPLITS)] = SPLITS,
) -> None:
    """Score all of them, and write all scores and a picture."""
    console = Console()
    predictors: dict[str, Callable[[Split], Said]] = {OURS: Ours(model), **PEERS}
    known, asked = data_sets(), models.split(",")
    with usage_errors():
        if unknown := set(asked) - predictors.keys():
            raise ValueError(f"models are {', '.join(predictors)}; got {', '.join(unknown)}")
        chosen = [name for name in known if only is None or name.startswith(only)]
        if not chosen:
            raise ValueError(f"data sets are {', '.join(known)}; got {only}")
    file = out / f"regressors-{environment_name(torch.device('cpu'))}.csv"
    scores = rows_before(Score, file)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            for data in chosen:
                for number, split in zip(range(splits), known[data](), strict=False):
                    after = [score(data, number, split, x, predictors[x]) for x in asked]
                    scores = merged(scores, after, [*known])
                write(scores, file, draw, formats=FORMATS)
                console.print(f"{data}: done", highlight=False)
    finally:
        torch.set_num_threads(threads)
    console.print(summary(scores))
    found = [x for x in map(standing, grouped(scores).values()) if x is not None]
    level = sum(each.level for each in found)
    console.print(
        f"{OURS} is the best or within a standard error of it on {level} of {len(found)}",
        highlight=False,
    )
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
