"""Does a model lose its way in a sequence longer than those that it was trained on?

    python -m fusewright_models.studies.positions RUN --out integration/results

scores the same pieces of a run's held-out text twice: near the start of a window, as tokens 4,096
to 8,191, and far behind it, as tokens 28,672 to 32,767. What differs is the distance alone, so that
the mean difference and its standard error over the pieces tell what distance costs. Rows of other
runs that the file has stay.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from .. import figures
from ..cli.commands import read_run, usage_errors
from ..cli.evaluate import OF_TRAINING
from ..cli.generate import kind_of
from ..cli.weights import load_model
from ..text.evaluation import LanguageModel
from ..text.windows import NOTHING
from ..training import RunFolder
from .recall import environment
from .results import beside, rows_before, write

PIECE, NEAR, FAR = 4096, 4096, 28672


@dataclass(frozen=True)
class PiecePoint:
    """One piece of held-out text, scored twice: a row of the result file.

    Attributes:
        run: name of its folder.
        seq_len: of the training.
        start: of the piece in the held-out text.
        length: tokens of it.
        near, far: tokens before it in the window.
        near_loss, far_loss: minus the mean of log p(token), nats.
    """

    run: str
    seq_len: int
    start: int
    length: int
    near: int
    far: int
    near_loss: float
    far_loss: float


@torch.no_grad()
def piece_losses(
    model: LanguageModel, stream: Tensor, *, length: int, near: int, far: int
) -> Iterator[tuple[int, float, float]]:
    """The start of every piece of a stream that stands behind ``far`` tokens or more, with its
    losses behind ``near`` and behind ``far`` of them.

    Args:
        model: in evaluation mode, on the stream's device.
        stream: ``[N]`` tokens.
        length: of a piece.
        near, far: tokens that the model reads before it.

    Raises:
        ValueError: no piece stands so far in the stream.
    """
    if len(stream) <= far + length:
        raise ValueError(
            f"wanted more than {far + length} tokens of held-out text; got {len(stream)}"
        )
    for start in range(far, len(stream) - length, length):
        losses: list[float] = []
        for before in (near, far):
            window = stream[start - before : start + length + 1].long().unsqueeze(0)
            targets = window[:, 1:].clone()
            targets[:, :before] = NOTHING
            losses.append(float(model.loss(window, targets=targets)))  # sync: the result
        yield start, losses[0], losses[1]


def difference(points: list[PiecePoint]) -> tuple[float, float]:
    """The mean of far - near, nats, and its standard error."""
    differences = [point.far_loss - point.near_loss for point in points]
    count = len(differences)
    error = statistics.stdev(differences) / count**0.5 if count > 1 else math.nan
    return statistics.mean(differences), error


def draw(points: list[PiecePoint]) -> Figure:
    """far over near, a dot for each piece, and the line where both are one."""
    near, far = points[0].near, points[0].far
    heading = "The loss of the same text far from its beginning and near it"
    figure, (axes,) = figures.panels([""], heading=heading, height=4.6, width=5.6)
    runs = dict.fromkeys(point.run for point in points)
    for run, colour in zip(runs, itertools.cycle(figures.CURVES), strict=False):
        own = [point for point in points if point.run == run]
        mean, error = difference(own)
        label = f"{run}: far − near is {mean:+.4f} ± {error:.4f} nats"
        losses = [p.near_loss for p in own], [p.far_loss for p in own]
        axes.plot(*losses, ".", color=colour, label=label)
    every = [loss for point in points for loss in (point.near_loss, point.far_loss)]
    corner = min(every), min(every)
    axes.axline(corner, slope=1.0, color="k", linewidth=0.8, linestyle=":", label="the same")
    behind = "nats a byte behind {:,} tokens, lower is better"
    figures.dress(axes, x=behind.format(near), y=behind.format(far))
    figures.legend(figure, columns=1)
    return figure


def main(
    run: Annotated[Path, typer.Argument(help="Folder of a language model's run.")],
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    length: Annotated[int, typer.Option(min=1, help="Tokens of a piece.")] = PIECE,
    near: Annotated[int, typer.Option(min=1, help="Tokens before it.")] = NEAR,
    far: Annotated[int, typer.Option(min=1, help="Tokens before it, the second time.")] = FAR,
    device: Annotated[str | None, typer.Option(help="Default: that of the training.")] = None,
) -> None:
    """Score pieces of held-out text near the start of a window and far behind it."""
    console, folder = Console(), RunFolder(run)
    with usage_errors():
        trained = replace(read_run(kind_of(folder), folder), **OF_TRAINING)
        if device is not None:
            trained = replace(trained, device=device)
        corpus = trained.corpus()
        model: Any = trained.model(corpus.tokenizer.vocab_size)
        load_model(model, folder)
        where, bf16 = torch.device(trained.device), trained.precision == "bf16"
        with torch.autocast(where.type, dtype=torch.bfloat16, enabled=bf16):
            scored, sizes = trained.scored(model), {"length": length, "near": near, "far": far}
            points = [
                PiecePoint(run.name, trained.seq_len, start, length, near, far, *losses)
                for start, *losses in piece_losses(scored, corpus.held_out, **sizes)
            ]
    file = out / f"positions-{environment(where)}.csv"
    rows = beside(points, rows_before(PiecePoint, file), lambda point: point.run)
    write(rows, file, draw, number=".5f")
    mean, error = difference(points)
    console.print(
        f"{len(points)} pieces, far - near: {mean:+.5f} nats, standard error {error:.5f}; "
        f"results in {file}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
