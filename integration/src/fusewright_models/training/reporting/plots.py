"""Curves of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...figures import CURVES, NEUTRAL, dress

if TYPE_CHECKING:
    from ..run_folder import RunFolder

LIKELIHOOD = "log_likelihood"
LOSS_PICTURE = "loss.png"


def plot_loss(folder: RunFolder) -> None:
    """Draw the folder's metrics into loss.png."""
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    draw_loss(figure.subplots(), folder.read_metrics())
    folder.draw(LOSS_PICTURE, figure)


def draw_loss(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """The training loss, and minus every log-likelihood of the evaluations: the loss of each of our
    models is one, in nats.
    """
    draw_line(axes, lines, "loss", color=NEUTRAL, label="training")
    names = {name for line in lines for name in line if name.endswith(LIKELIHOOD)}
    for colour, name in zip(CURVES, sorted(names), strict=False):
        points = [(line["step"], -line[name]) for line in lines if name in line]
        label = name.removesuffix(LIKELIHOOD).replace("_", " ").strip()
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
    dress(axes, x="step", y="minus log-likelihood, nats")
    axes.legend(frameon=False)


def draw_curves(lines: list[dict[str, Any]]) -> Figure:
    """Losses, and below them gradient norm and rate."""
    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "loss"], ["norm", "rate"]], height_ratios=(3, 2))
    draw_loss(panels["loss"], lines)
    draw_line(panels["norm"], lines, "gradient_norm", color=CURVES[0])
    dress(panels["norm"], x="step", y="gradient norm")
    draw_line(panels["rate"], lines, "lr", color=CURVES[0])
    dress(panels["rate"], x="step", y="learning rate")
    return figure


def draw_speed(lines: list[dict[str, Any]]) -> Figure:
    """Tokens a second, and the peak of memory where it is known."""
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for axes, name, label in (
        (speed, "tokens_per_second", "tokens a second"),
        (memory, "peak_memory_mib", "peak memory, MiB"),
    ):
        draw_line(axes, lines, name, color=CURVES[0])
        # From zero on, and with room above.
        axes.set_ylim(0.0, 1.1 * max((line.get(name, 1.0) for line in lines), default=1.0))
        dress(axes, x="step", y=label)
    return figure


def draw_line(axes: Axes, lines: list[dict[str, Any]], name: str, **how: Any) -> None:
    """The numbers of that name, by step."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    axes.plot([step for step, _ in found], [x for _, x in found], linewidth=1.0, **how)
