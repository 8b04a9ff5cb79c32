"""The loss curve of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from .run_folder import RunFolder

LIKELIHOOD = "log_likelihood"
COLOURS = ("C0", "C1", "C2")
LOSS_PICTURE = "loss.png"


def plot_loss(folder: RunFolder) -> None:
    """Draw the folder's metrics into loss.png.

    The training loss, and minus every log-likelihood of the evaluations: the loss of each of our
    models is one, in nats.
    """
    lines = folder.read_metrics()
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    training = [line for line in lines if "loss" in line]
    axes.plot(
        [line["step"] for line in training],
        [line["loss"] for line in training],
        color="0.65",
        linewidth=1.0,
        label="training",
    )
    names = {name for line in lines for name in line if name.endswith(LIKELIHOOD)}
    for colour, name in zip(COLOURS, sorted(names), strict=False):
        points = [(line["step"], -line[name]) for line in lines if name in line]
        label = name.removesuffix(LIKELIHOOD).replace("_", " ").strip()
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("minus log-likelihood, nats")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    folder.draw(LOSS_PICTURE, figure)
