"""What `selection` writes: a row for each layer and evaluation, and their curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.figure import Figure

from .attention_mass import MASSES

Phase = Literal["alone", "dense", "sparse"]
# Of the layer that predicts the token after next, which stands behind the stack.
LAST = "last"
COLOURS = {"selected": "C0", "window": "C1", "random": "C2", "sinks": "0.6"}


@dataclass(frozen=True)
class Point:
    """One layer at one evaluation: a row of the result file.

    Attributes:
        seconds: of training so far.
        phase: what the steps before it were: "alone" are those that the indexers learn nothing of.
        layer: its number from 1, or "last".
        bits_per_byte: of the next byte, held out; the model's.
        kl, kl_uniform: divergences in nats, means over queries.
        keys: mean of k_t.
    """

    step: int
    seconds: float
    phase: Phase
    layer: str
    bits_per_byte: float
    kl: float
    kl_uniform: float
    keys: float
    selected: float
    window: float
    random: float
    sinks: float


def draw(points: list[Point]) -> Figure:
    """Divergences and masses over steps: means over the layers of the stack, each layer thin. The
    ground of what is not sparse is grey, darker where the indexers learn nothing.
    """
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    stack = [point for point in points if point.layer != LAST]
    steps = sorted({point.step for point in stack})
    layers = list(dict.fromkeys(point.layer for point in stack))

    def curve(axes: Any, name: str, label: str, colour: str) -> None:
        for layer in layers:
            mine = [point for point in stack if point.layer == layer]
            some = [getattr(point, name) for point in mine]
            axes.plot([point.step for point in mine], some, color=colour, alpha=0.3, linewidth=0.7)
        of_step = [[getattr(p, name) for p in stack if p.step == step] for step in steps]
        axes.plot(steps, [sum(some) / len(some) for some in of_step], color=colour, label=label)

    curve(left, "kl", "indexer", "C0")
    curve(left, "kl_uniform", "no key from another", "0.6")
    for name in MASSES:
        curve(right, name, name, COLOURS[name])
    for axes in (left, right):
        for phase in ("alone", "dense"):
            end = max((point.step for point in points if point.phase == phase), default=0)
            axes.axvspan(0, end, color="k", alpha=0.06, linewidth=0.0)
        axes.set(xlabel="step", ylim=(0.0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    left.set_ylabel("divergence from the attention, nats")
    right.set_ylabel("mass of the dense attention")
    return figure
