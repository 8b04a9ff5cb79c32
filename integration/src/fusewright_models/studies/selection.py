"""Does the indexer learn to select? The keys that it chooses against others, as HybridLM trains.

    python -m fusewright_models.studies.selection --device cuda --out integration/results

trains HybridLM `mini` on bytes of the standard library: first alone, while its indexers learn
nothing, then with them, attention still dense, and then sparse. At every evaluation, on held-out
text that the model reads as it is used, sparse, it measures what of the attention that a query
would give if it saw all keys falls on the selected keys, on a window of as many, and on as many
drawn before that window (`attention_mass`). Beside these stand the Kullback-Leibler divergences
from that attention of the indexer's softmax over all keys, and of one that tells no key from
another: attention that looks at nothing in particular is easy to follow.

All evaluations go to selection-ENVIRONMENT.csv, their curves to a picture beside it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from fusewright.attention import Backend
from fusewright.gsa import GatedSparseAttention, Selection
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from .. import figures
from ..bench.results import environment_name
from ..choices import HybridPresetName
from ..cli.commands import optimizer_of, usage_errors
from ..cli.hybrid import HybridRun
from ..devices import checked_device
from ..models.hybrid import HybridLM
from ..training import Trainer
from .attention_mass import MASSES, layer_sums
from .late_indexers import LateWindows, late_losses
from .results import columns, write

Phase = Literal["alone", "dense", "sparse"]
# Of the layer that predicts the token after next, which stands behind the stack.
LAST = "last"
KEYS = {
    "selected": "selected by the indexer",
    "window": "a window of as many",
    "random": "as many drawn before it",
    "sinks": "sinks",
}
COLOURS = dict(zip(KEYS, (*figures.CURVES[:3], figures.NEUTRAL), strict=True))


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
    titles = ["divergence from the attention, lower is better"]
    titles += ["mass of the dense attention on the keys, higher is better"]
    heading = "HybridLM: what its indexers select, means over layers and each layer thin"
    figure, (left, right) = figures.panels(titles, heading=heading, height=4.0)
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

    curve(left, "kl", "selected by the indexer", COLOURS["selected"])
    curve(left, "kl_uniform", "an indexer that tells no key from another", "k")
    for name in MASSES:
        curve(right, name, KEYS[name], COLOURS[name])
    for axes, label in ((left, "nats"), (right, "mass")):
        for phase in ("alone", "dense"):
            end = max((point.step for point in points if point.phase == phase), default=0)
            axes.axvspan(0, end, color="k", alpha=0.06, linewidth=0.0)
        axes.set_ylim(0.0, None)
        figures.dress(axes, x="step; grey: attention is not sparse yet", y=label)
    figures.legend(figure, columns=3)
    return figure


def check_text(text: Tensor, length: int) -> None:
    """Refuse a held-out text that has no window of so many bytes and the one after."""
    if len(text) <= length:
        raise ValueError(f"wanted a held-out text of more than {length} bytes; got {len(text)}")


@torch.no_grad()
def evaluate_selection(
    model: HybridLM, text: Tensor, *, length: int, windows: int, batch_size: int
) -> dict[str, float]:
    """Masses and divergences of each layer over the first windows of a held-out text of bytes, and
    the model's bits per byte, by name: "4 selected" is of the fourth layer.

    Raises:
        ValueError: the text has no whole window.
    """
    check_text(text, length)
    some = text[: windows * length + 1].unfold(0, length + 1, length).long()
    config = model.config
    names = [str(place + 1) for place in range(config.layers) if config.is_sparse(place)]
    sums: list[Any] = [0.0] * (len(names) + 1)
    nats = torch.zeros((), dtype=torch.float64, device=text.device)
    queries = [0] * len(sums)
    for batch in some.split(batch_size):
        layer = 0

        def listen(attention: GatedSparseAttention, u: Tensor, selection: Selection) -> None:
            nonlocal layer
            sums[layer] = sums[layer] + torch.cat(layer_sums(attention, u, selection))
            queries[layer] += u.shape[0] * u.shape[1]
            layer += 1

        losses = model.losses(batch, observe=listen)
        nats += losses.following.double() * batch.shape[0]
    found = {"bits_per_byte": float(nats) / len(some) / math.log(2.0)}
    for name, numbers, count in zip([*names, LAST], sums, queries, strict=True):
        *masses, counted, kl, uniform = numbers.tolist()  # sync: the result of the evaluation
        of_layer = dict(
            zip((*MASSES, "keys"), (x / max(counted, 1.0) for x in masses), strict=True)
        )
        of_layer |= {"kl": kl / count, "kl_uniform": uniform / count}
        found |= {f"{name} {what}": x for what, x in of_layer.items()}
    return found


def points_of(line: dict[str, Any], seconds: float, phase: Phase) -> list[Point]:
    """A point for each layer of an evaluation."""
    layers = dict.fromkeys(name.partition(" ")[0] for name in line if name.endswith(" selected"))
    points = []
    for layer in layers:
        own: dict[str, Any] = {name: line.get(f"{layer} {name}") for name in columns(Point)}
        shared = {"step": line["step"], "bits_per_byte": line["bits_per_byte"]}
        shared |= {"seconds": seconds, "phase": phase, "layer": layer}
        points.append(Point(**(own | shared)))
    return points


def train_and_evaluate(
    run: HybridRun, *, alone: int, windows: int, minutes: float, console: Console
) -> list[Point]:
    """Train until the run's end, or to the first evaluation after so many minutes of it all; of the
    first ``alone`` steps the indexers learn nothing.

    Raises:
        typer.BadParameter: the run cannot be served.
    """
    begun = time.monotonic()
    with usage_errors():
        corpus = run.corpus()
        model = run.model(corpus.tokenizer.vocab_size)
        unfollowed = alone * run.gradient_accumulation_steps
        source, optimizer = LateWindows(run.windows(corpus), unfollowed), optimizer_of(run, model)
        check_text(corpus.held_out, run.seq_len)
    points: list[Point] = []
    seconds = 0.0

    def observe(line: dict[str, Any]) -> None:
        nonlocal seconds
        if "bits_per_byte" in line:
            ends: dict[Phase, int] = {"alone": alone, "dense": run.indexer_warmup}
            phases = (phase for phase, end in ends.items() if line["step"] <= end)
            points.extend(points_of(line, seconds, next(phases, "sparse")))
        else:
            seconds += line["seconds"]
            told = ", ".join(f"{name} {x:.4g}" for name, x in line.items())
            console.print(told, highlight=False)

    def evaluation() -> dict[str, float]:
        return evaluate_selection(
            model, corpus.held_out, length=run.seq_len, windows=windows, batch_size=4
        )

    parts = model, source, late_losses, optimizer, run.training(), None
    trainer = Trainer(*parts, evaluate=evaluation, console=console, observe=observe)
    while True:
        trainer.run(until=trainer.step + run.eval_every)
        if trainer.step >= run.steps or time.monotonic() - begun >= 60.0 * minutes:
            return points


def main(
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    preset: Annotated[HybridPresetName, typer.Option()] = "mini",
    steps: Annotated[int, typer.Option(min=1)] = 3000,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="Stop at the first evaluation after them.")
    ] = 7.0,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seq_len: Annotated[int, typer.Option(min=8)] = 1024,
    lr: Annotated[float, typer.Option()] = 1e-3,
    indexer_start: Annotated[
        int, typer.Option(min=0, help="Steps of which the indexers learn nothing.")
    ] = 300,
    indexer_warmup: Annotated[
        int, typer.Option(min=0, help="Dense steps, those that the indexers learn nothing of too.")
    ] = 450,
    indexer_rate: Annotated[float, typer.Option()] = 1.0,
    indexer_temperature: Annotated[float | None, typer.Option()] = None,
    selected_keys: Annotated[int | None, typer.Option()] = 32,
    windows: Annotated[int, typer.Option(min=1, help="Of an evaluation.")] = 32,
    eval_every: Annotated[int | None, typer.Option(help="Default: a 20th of all.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Default: the standard library.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option()] = "cpu",
    backend: Annotated[Backend, typer.Option()] = "auto",
) -> None:
    """Train HybridLM and see what its indexers select; write all evaluations and their curves."""
    # Those of the run; others are of the study.
    chosen = dict(
        preset=preset,
        batch_size=batch_size,
        seq_len=seq_len,
        lr=lr,
        indexer_warmup=indexer_warmup,
        indexer_rate=indexer_rate,
        indexer_temperature=indexer_temperature,
        selected_keys=selected_keys,
        dataset=dataset,
        seed=seed,
        device=device,
        backend=backend,
    )
    console = Console(width=200)
    every = eval_every or max(1, steps // 20)
    flags = {name: x for name, x in chosen.items() if x is not None}
    flags |= {"steps": steps, "gradient_accumulation_steps": 1, "dataset_tokens": 2**24}
    flags |= {"eval_every": every, "log_every": max(1, every // 2)}
    with usage_errors():
        if indexer_start > indexer_warmup:
            raise ValueError(
                f"indexer_start must be at most indexer_warmup, {indexer_warmup}; "
                f"got {indexer_start}"
            )
        where = checked_device(device)
        run = HybridRun.from_flags(flags)
    points = train_and_evaluate(
        run, alone=indexer_start, windows=windows, minutes=minutes, console=console
    )
    file = out / f"selection-{environment_name(where)}.csv"
    write(points, file, draw, number=".5g")
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
