"""The pictures of the studies, drawn again from their result files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..figures import save
from . import (
    compare_optimizers,
    far_recall,
    learning,
    long_training,
    positions,
    pretraining,
    recall,
    regressors,
    scaling,
    selection,
    selection_pays,
)
from .results import read

# From what the name of a result file begins with to the kind of its rows, and what draws them.
DRAWN: dict[str, tuple[type[Any], Callable[[Any], Figure]]] = {
    "far-recall": (far_recall.FarPoint, far_recall.draw),
    "learning": (learning.Point, learning.draw),
    "long-training": (long_training.LongPoint, long_training.draw),
    "optimizers": (compare_optimizers.Point, compare_optimizers.draw),
    "positions": (positions.PiecePoint, positions.draw),
    "pretraining": (pretraining.Point, pretraining.draw),
    "recall": (recall.RecallPoint, recall.draw),
    "regressors": (regressors.Score, regressors.draw),
    "scaling": (scaling.Line, scaling.draw),
    "selection": (selection.Point, selection.draw),
    "selection-pays": (selection_pays.PaysPoint, selection_pays.draw),
}


def drawn_from(folder: Path) -> dict[Path, tuple[list[Any], Callable[[Any], Figure]]]:
    """Each result file of a study that is there: its rows and what draws them; no files of other
    columns.
    """
    found = {}
    for name, (kind, draw) in DRAWN.items():
        for file in sorted(folder.glob(f"{name}*.csv")):
            rows: list[Any] | None = read(kind, file)
            if rows:
                found[file] = rows, draw
    return found


def redraw(folder: Path) -> None:
    """Draw the pictures of all studies that have a result file there."""
    for file, (rows, draw) in drawn_from(folder).items():
        save(draw(rows), file)
