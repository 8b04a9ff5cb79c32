"""What the subcommand does that predicts rows of a file from those of another."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import typer

from ..data.columns import Column, Columns, has_column, names_in, read_columns
from ..devices import checked_device
from ..models.transformer_np import TransformerNP
from ..prediction import Predicted, Predictor, load_trained
from ..training.files import write
from .commands import usage_errors


def predict_rows(
    run: str,
    *,
    context: Path,
    target: Path,
    out: Path,
    quantiles: str,
    inputs: str | None,
    output: str | None,
    device: str | None,
) -> None:
    """Write what a trained model says of each row of a file, given the rows of another.

    Raises:
        typer.BadParameter: it cannot be served; nothing is written.
    """
    with usage_errors():
        levels = _levels(quantiles)
        _check_out(out, context, target)
        where = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model, trained = load_trained(run, device=where)
        columns = _columns(run, model, trained, inputs, output)
        names, name = columns.input_names, columns.output.name
        known = read_columns(context, [*names, name])
        if not len(known):
            raise ValueError(f"wanted one row or more in {context}; got none")
        scored = has_column(target, name)
        asked = read_columns(target, [*names, name] if scored else names, gaps=(name,))
        x, y = asked[:, : len(names)], asked[:, -1] if scored else None
        predictor = Predictor(model, columns, known[:, :-1], known[:, -1])
        found = predictor.predict(x, quantiles=[level for _, level in levels], y=y)
        write(out, _csv(found, levels))
    told = f"{len(x):,} rows in {out}, given {len(known):,}"
    if found.log_probability is not None and not np.isnan(found.log_probability).all():
        told += f"; mean log-probability {np.nanmean(found.log_probability):.4f}"
    typer.echo(told)


def _levels(text: str) -> list[tuple[str, float]]:
    """Each as it is written, and as a number.

    Raises:
        ValueError: they are no numbers between 0 and 1.
    """
    written = [each.strip() for each in text.split(",") if each.strip()]
    try:
        levels = [(each, float(each)) for each in written]
    except ValueError:
        levels = [(text, math.nan)]
    if not all(0.0 < level < 1.0 for _, level in levels):
        raise ValueError(f"wanted numbers between 0 and 1 in --quantiles; got {text!r}")
    return levels


def _check_out(out: Path, *read: Path) -> None:
    """
    Raises:
        ValueError: it is no name of a CSV file, a folder, or a file that is read.
    """
    if out.suffix != ".csv" or out.is_dir():
        raise ValueError(f"wanted the name of a .csv file in --out; got {out}")
    if out.exists() and any(each.exists() and out.samefile(each) for each in read):
        raise ValueError(f"wanted another file in --out than those that are read; got {out}")


def _columns(
    run: str,
    model: TransformerNP,
    trained: Columns | None,
    inputs: str | None,
    output: str | None,
) -> Columns:
    """Those that the model was trained on, or those that are named for it, as they are.

    Raises:
        ValueError: both or neither are known, or there are not as many as the model has.
    """
    if trained is not None:
        if not (inputs is None and output is None):
            raise ValueError(
                f"--inputs and --output are for models that were trained without names; {run} has "
                f"{', '.join(trained.input_names)} and {trained.output.name}"
            )
        return trained
    if inputs is None or output is None:
        raise ValueError(
            f"wanted the names of columns in --inputs and --output, since {run} was trained "
            "without any; got none"
        )
    names = names_in(inputs)
    if len(names) != model.config.x_width:
        raise ValueError(
            f"wanted as many --inputs as the model has, {model.config.x_width}; got {inputs!r}"
        )
    return Columns(tuple(map(Column.as_is, names)), Column.as_is(output))


def _csv(found: Predicted, levels: list[tuple[str, float]]) -> bytes:
    header = ["mean", "standard_deviation", *(f"quantile_{written}" for written, _ in levels)]
    parts = [found.mean[:, None], found.standard_deviation[:, None], found.quantiles]
    if found.log_probability is not None:
        header.append("log_probability")
        parts.append(found.log_probability[:, None])
    rows = np.concatenate(parts, axis=1).tolist()
    # What is not known is left empty; the model computes with nine digits or fewer.
    lines = [",".join("" if math.isnan(x) else f"{x:.9g}" for x in row) for row in rows]
    return ("\n".join([",".join(header), *lines]) + "\n").encode()
