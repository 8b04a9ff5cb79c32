"""What a model predicts and how sure it is, drawn for every kind of data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..figures import CURVES, dress, legend
from ..models.transformer_np import TransformerNP, sample_jointly
from .digits import PIXELS, SIDE, Digits, pixel_of
from .gaussian_process import GaussianProcess
from .linear_regression import LinearRegression
from .prior import PriorTasks
from .table import TableTasks
from .task import Sampler

# Held-out images of six different digits, and how many of their pixels are shown.
DIGITS = ((14, 4), (11, 8), (15, 12), (3, 16), (7, 24), (6, 32))
INTENSITY = {"cmap": "gray", "vmin": -0.5, "vmax": 0.5}
SPREAD = {"cmap": "magma", "vmin": 0.0, "vmax": 0.35}
TICKS = {"mean": (-0.4, 0.0, 0.4), "standard deviation": (0.1, 0.2, 0.3)}
UNKNOWN = "#d9e4f2"
CURVE_CONTEXTS = (3, 5, 8, 12, 20, 40)
LINEAR_CONTEXTS = (8, 16, 64)
LINEAR_TARGETS = 20
PRIOR_CONTEXTS = (10, 100, 1000)
GRID_POINTS = 201


def draw_predictions(model: TransformerNP, sampler: Sampler) -> Figure:
    """The picture that belongs to the sampler's data, the same tasks at every call.

    Args:
        model: in evaluation mode, on the sampler's device.
        sampler: of held-out data; it is set back to its seed.

    Raises:
        TypeError: there is no picture for this sampler.
    """
    sampler.reset()
    if isinstance(sampler, Digits):
        return draw_digits(model, sampler)
    if isinstance(sampler, GaussianProcess):
        return draw_curves(model, sampler)
    if isinstance(sampler, LinearRegression):
        return draw_regression(model, sampler, LINEAR_CONTEXTS, LINEAR_TARGETS, "oracle")
    if isinstance(sampler, TableTasks):
        low, high = sampler.contexts.low, sampler.contexts.high
        contexts = sorted({low, (low + high) // 2, high})
        targets = min(LINEAR_TARGETS, len(sampler.table.held_out))
        return draw_regression(model, sampler, contexts, targets, sampler.reference)
    if isinstance(sampler, PriorTasks):
        return draw_regression(model, sampler, PRIOR_CONTEXTS, LINEAR_TARGETS, sampler.reference)
    raise TypeError(f"wanted a sampler of this package; got {type(sampler).__name__}")


def draw_digits(model: TransformerNP, sampler: Digits) -> Figure:
    """A row per digit: context, mean, standard deviation, one sample, truth."""
    titles = ("context", "mean", "standard deviation", "one sample", "truth")
    rows = len(DIGITS)
    figure = Figure(figsize=(1.5 * len(titles) + 0.2, 1.5 * rows + 0.5), layout="constrained")
    *grid, bars = figure.subplots(rows + 1, len(titles), height_ratios=[1.0] * rows + [0.05])
    for row, (number, context) in enumerate(DIGITS):
        image = torch.full((1,), number, device=sampler.device)
        task = sampler.sample_of(image, context, PIXELS - context)
        prediction = model.predict(task.x_context, task.y_context, task.x_target)
        points = task.x_context, task.y_context, task.x_target
        sample = sample_jointly(model, *points, generator=sampler.generator).y
        unknown_context, unknown_target = (
            torch.full_like(y, torch.nan) for y in (task.y_context, task.y_target)
        )
        columns = (
            (task.y_context, unknown_target),
            (task.y_context, prediction.mean),
            (unknown_context, prediction.variance.sqrt()),
            (task.y_context, sample),
            (task.y_context, task.y_target),
        )
        x = torch.cat([task.x_context, task.x_target], dim=1)
        for axes, title, y in zip(grid[row], titles, columns, strict=True):
            colours = SPREAD if title == "standard deviation" else INTENSITY
            axes.imshow(_image(x, torch.cat(y, dim=1)), **colours)
            axes.set_facecolor(UNKNOWN)
            axes.set(xticks=[], yticks=[])
            if row == 0:
                axes.set_title(title, fontsize=9)
        grid[row][0].set_ylabel(f"{context} of {PIXELS} pixels", fontsize=9)
    for column, axes in enumerate(bars):
        if titles[column] in TICKS:
            image = grid[0][column].images[0]
            ticks = TICKS[titles[column]]
            figure.colorbar(image, cax=axes, orientation="horizontal", ticks=ticks)
            axes.tick_params(labelsize=7)
        else:
            axes.set_axis_off()
    return figure


def draw_curves(model: TransformerNP, sampler: GaussianProcess) -> Figure:
    """A panel per function: context, truth, mean and two standard deviations, and the oracle's."""
    figure = Figure(figsize=(11.0, 5.6), layout="constrained")
    x_grid = torch.linspace(-2.0, 2.0, GRID_POINTS, device=sampler.device).reshape(1, -1, 1)
    for axes, context in zip(figure.subplots(2, 3).flat, CURVE_CONTEXTS, strict=True):
        x = torch.cat([sampler.uniform(-2.0, 2.0, 1, context, 1), x_grid], dim=1)
        task = sampler.sample_at(x, context)
        ours = model.predict(task.x_context, task.y_context, task.x_target)
        mean, variance = sampler.predict(task, task.x_target)
        line = _host(x_grid)
        _band(axes, line, ours.mean, ours.variance, CURVES[0], "model")
        low, high = (_host(mean + sign * 2.0 * variance.sqrt()) for sign in (-1.0, 1.0))
        axes.plot(line, low, color="0.35", linestyle=":", linewidth=1.0, label="oracle")
        axes.plot(line, high, color="0.35", linestyle=":", linewidth=1.0)
        axes.plot(line, _host(task.y_target), color=CURVES[1], linewidth=1.0, label="truth")
        axes.plot(_host(task.x_context), _host(task.y_context), "k.", markersize=7, label="context")
        axes.set_title(f"{context} context points", fontsize=9)
        dress(axes, x="")
    legend(figure)
    return figure


def draw_regression(
    model: TransformerNP,
    sampler: LinearRegression | TableTasks | PriorTasks,
    contexts: Sequence[int],
    targets: int,
    reference: str,
) -> Figure:
    """A panel per context size: predictions with two standard deviations, and the reference's."""
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    panels = figure.subplots(1, len(contexts), squeeze=False).flat
    for axes, context in zip(panels, contexts, strict=True):
        task = sampler.finished(sampler.sample_sized(1, context, targets))
        order = task.y_target.argsort(dim=1)
        x_target = task.x_target.gather(1, order.expand_as(task.x_target))
        y_target = task.y_target.gather(1, order)
        ours = model.predict(task.x_context, task.y_context, x_target)
        theirs = sampler.predict(task, x_target)
        truth = _host(y_target)
        for shift, (mean, variance), colour, label in (
            (-0.1, ours[:2], CURVES[0], "model"),
            (0.1, theirs, "0.55", reference),
        ):
            axes.errorbar(
                truth + shift,
                _host(mean),
                2.0 * _host(variance.sqrt()),
                fmt="o",
                color=colour,
                markersize=3,
                elinewidth=1.0,
                label=label,
            )
        axes.axline((0.0, 0.0), slope=1.0, color="k", linewidth=0.8)
        axes.set_title(f"{context} context points", fontsize=9)
        dress(axes, x="y")
    figure.supylabel("prediction, two standard deviations", fontsize="medium")
    legend(figure)
    return figure


def _band(
    axes: Axes, line: np.ndarray, mean: Tensor, variance: Tensor, colour: str, label: str
) -> None:
    centre, spread = _host(mean), 2.0 * _host(variance.sqrt())
    axes.plot(line, centre, color=colour, linewidth=1.4, label=label)
    axes.fill_between(line, centre - spread, centre + spread, color=colour, alpha=0.2, linewidth=0)


def _image(x: Tensor, y: Tensor) -> np.ndarray:
    """Pixels of one task in any order to an image, rows downwards."""
    image = torch.empty_like(y[0, :, 0])
    image[pixel_of(x[0])] = y[0, :, 0]
    return _host(image).reshape(SIDE, SIDE)


def _host(tensor: Tensor) -> np.ndarray:
    """One task's values as a flat array."""
    return tensor.flatten().double().cpu().numpy()  # sync: pictures are drawn on the host
