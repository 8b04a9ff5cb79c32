"""Tables and functions that scikit-learn ships, each in ten splits of known and scored rows.

Of real ones a fifth of the rows is scored, drawn for each split; of Friedman's functions and the
sparse one each split draws its rows, 500 of them to be scored. Columns of iris, wine and breast
cancer stand as outputs of others of the same table, ten at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn import datasets  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

SPLITS, SHARE = 10, 0.2
# Rows that are known of a function, and rows that are scored.
SIZES, SCORED = (200, 500, 1000), 500
MOST_COLUMNS = 10


class Split(NamedTuple):
    """Rows that are known, and rows that are scored."""

    x: np.ndarray
    y: np.ndarray
    x_asked: np.ndarray
    y_asked: np.ndarray


def splits_of(x: np.ndarray, y: np.ndarray) -> Iterator[Split]:
    for number in range(SPLITS):
        parts = train_test_split(x, y, test_size=SHARE, random_state=number)
        yield Split(parts[0], parts[2], parts[1], parts[3])


def drawn(make: Callable[..., tuple[np.ndarray, np.ndarray]], rows: int) -> Iterator[Split]:
    for number in range(SPLITS):
        x, y = make(n_samples=rows + SCORED, random_state=number)
        yield Split(x[:rows], y[:rows], x[rows:], y[rows:])


def of_column(x: np.ndarray, column: int) -> Iterator[Split]:
    """A column of a table, of the first ten others."""
    others = np.delete(x, column, axis=1)[:, :MOST_COLUMNS]
    return splits_of(others, x[:, column])


def data_sets() -> dict[str, Callable[[], Iterator[Split]]]:
    """By name, what gives their splits."""
    found: dict[str, Callable[[], Iterator[Split]]] = {}
    diabetes, linnerud = datasets.load_diabetes(), datasets.load_linnerud()
    found["diabetes"] = partial(splits_of, diabetes.data, diabetes.target)
    for place, name in enumerate(linnerud.target_names):
        output = linnerud.target[:, place]
        found[f"linnerud {name.lower()}"] = partial(splits_of, linnerud.data, output)
    functions = {
        "friedman 1": partial(datasets.make_friedman1, noise=1.0),
        "friedman 2": partial(datasets.make_friedman2, noise=125.0),
        "friedman 3": partial(datasets.make_friedman3, noise=0.1),
        "sparse uncorrelated": datasets.make_sparse_uncorrelated,
    }
    for name, make in functions.items():
        for rows in SIZES:
            found[f"{name}, {rows}"] = partial(drawn, make, rows)
    tables: dict[str, tuple[Any, int, Iterable[int]]] = {
        "iris": (datasets.load_iris(), 4, range(4)),
        # alcohol, color_intensity, proline
        "wine": (datasets.load_wine(), 13, (0, 9, 12)),
        # texture, area, smoothness, symmetry, of the ten means
        "breast cancer": (datasets.load_breast_cancer(), 10, (1, 3, 4, 8)),
    }
    for name, (table, width, outputs) in tables.items():
        for column in outputs:
            title = str(table.feature_names[column]).removesuffix(" (cm)").replace("_", " ")
            found[f"{name} {title}"] = partial(of_column, table.data[:, :width], column)
    return found
