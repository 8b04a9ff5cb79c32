"""What does selecting cost a model? HybridLM trained with selected keys and with dense attention.

    python -m fusewright_models.studies.selection_pays --variant selected --seed 0 --device cuda
    --out integration/results

trains HybridLM `mini` on bytes of the standard library and scores it on held-out ones. Of variant
"selected" each query attends to a sixteenth of the window's length in keys, half of them the last
ones up to its own; the first tenth of its steps is dense, so that the indexers see what to look
for. Of variant "dense" all steps and evaluations are dense. The rest is the same for one seed:
weights, batches, steps. All evaluations go to selection-pays-ENVIRONMENT.csv, where rows of other
trainings stay, and their curves to a picture beside it; several trainings may run side by side.

With --selections FILE what the layers of a trained model select in held-out text goes to a file,
which packages/gsa/crossover.py takes attention's time for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from filelock import FileLock
from fusewright.attention import Backend
from fusewright.gsa import Selection
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from .. import figures
from ..bench.results import environment_name
from ..choices import HybridPresetName
from ..cli.commands import optimizer_of, usage_errors
from ..cli.hybrid import HybridRun, all_losses
from ..cli.options import LARGEST_SEED
from ..devices import checked_device
from ..models.hybrid import HybridConfig, HybridLM
from ..training import Trainer
from .results import beside, rows_before, write
from .selection import check_text

Variant = Literal["dense", "selected"]
VARIANTS: tuple[Variant, ...] = ("dense", "selected")
COLOURS = {"dense": figures.NEUTRAL, "selected": figures.CURVES[0]}
# A query's keys are this part of the window's length, and its last ones this part of them.
PART, WINDOW_PART = 16, 2
# Evaluations of a training, beside the one before its first step.
EVALUATIONS = 4
# Lengths and keys of the selections that are kept.
KEPT = ((4096, 256), (4096, 512), (8192, 512), (16384, 512))


@dataclass(frozen=True)
class PaysPoint:
    """One evaluation: a row of the result file.

    Attributes:
        variant: "dense" or "selected".
        keys: of a query; the tokens of a window where attention is dense.
        bits_per_byte: of the next byte, held out.
        error: its standard error over batches of windows.
    """

    variant: str
    seed: int
    tokens: int
    keys: int
    steps: int
    step: int
    bits_per_byte: float
    error: float


def training_of(point: PaysPoint) -> tuple[str, int, int, int]:
    return point.variant, point.seed, point.tokens, point.steps


def selecting(config: HybridConfig, keys: int) -> HybridConfig:
    """The shape whose queries select so many keys each, with a window of the last ones."""
    counts: dict[str, Any] = dict.fromkeys(("k_base", "k_min", "k_max"), keys)
    return replace(config, law="fixed", window=keys // WINDOW_PART, **counts)


class PaysRun(HybridRun):
    """A run whose queries select a part of the window."""

    def shape(self, vocab_size: int) -> HybridConfig:
        return selecting(super().shape(vocab_size), self.seq_len // PART)


@torch.no_grad()
def evaluated(
    model: HybridLM, text: Tensor, *, dense: bool, length: int, windows: int, batch_size: int
) -> dict[str, float]:
    """Bits per byte over the first windows of a held-out text, and their standard error over the
    batches that they are read in.

    Raises:
        ValueError: the text has no whole window.
    """
    check_text(text, length)
    some = text[: windows * length + 1].unfold(0, length + 1, length).long()
    batches = some.split(batch_size)
    nats = torch.stack([model.losses(batch, dense=dense).following for batch in batches])
    weights = torch.tensor([float(len(batch)) for batch in batches], dtype=torch.float64)
    bits = nats.double().cpu() / math.log(2.0)  # sync: the result of the evaluation
    mean = float((bits * weights).sum() / weights.sum())
    error = float(bits.std()) / math.sqrt(len(bits)) if len(bits) > 1 else math.nan
    return {"bits_per_byte": mean, "error": error}


def train_and_evaluate(
    run: PaysRun, variant: Variant, *, windows: int, console: Console
) -> tuple[list[PaysPoint], HybridLM, Tensor]:
    """Train until the run's end: all evaluations, the model and the held-out text.

    Raises:
        typer.BadParameter: the run cannot be served.
    """
    with usage_errors():
        corpus = run.corpus()
        model = run.model(corpus.tokenizer.vocab_size)
        source, optimizer = run.windows(corpus), optimizer_of(run, model)
        check_text(corpus.held_out, run.seq_len)
    lines: list[dict[str, Any]] = []

    def observe(line: dict[str, Any]) -> None:
        lines.append(line)
        told = ", ".join(f"{name} {x:.5g}" for name, x in line.items())
        console.print(f"{variant} {run.seed}: {told}", highlight=False)

    def evaluation() -> dict[str, float]:
        sizes = dict(length=run.seq_len, windows=windows, batch_size=run.batch_size)
        return evaluated(model, corpus.held_out, dense=variant == "dense", **sizes)

    parts = model, source, all_losses, optimizer, run.training(), None
    Trainer(*parts, evaluate=evaluation, console=console, observe=observe).run()
    keys = run.seq_len if variant == "dense" else model.config.k_base
    named = variant, run.seed, run.seq_len, keys, run.steps
    points = [
        PaysPoint(*named, line["step"], line["bits_per_byte"], line["error"])
        for line in lines
        if "bits_per_byte" in line
    ]
    return points, model.eval(), corpus.held_out


@torch.no_grad()
def selections(model: HybridLM, text: Tensor, *, tokens: int, keys: int) -> dict[str, Tensor]:
    """What each sparse layer of the stack selects in the first tokens of a text when its queries
    have so many keys: indices ``[tokens, keys]``, ascending, by the layer's number; the last count
    of a query that sees fewer keys are -1.

    Raises:
        ValueError: the text has fewer tokens.
    """
    check_text(text, tokens)
    config = selecting(model.config, keys)
    chooser = HybridLM(config, backend=model.backend).to(text.device).eval()
    chooser.load_state_dict(model.state_dict())
    found: list[Tensor] = []

    def listen(attention: Any, u: Tensor, selection: Selection) -> None:
        found.append(selection.indices[0])

    chooser.losses(text[None, : tokens + 1].long(), observe=listen)
    layers = [str(place + 1) for place in range(config.layers) if config.is_sparse(place)]
    # Behind those of the stack stands that of the layer that predicts the token after next.
    return dict(zip(layers, found[: len(layers)], strict=True))


def kept(model: HybridLM, text: Tensor, file: Path, sizes: Iterable[tuple[int, int]]) -> None:
    """Write the selections of such tokens and keys, those that the text has: of each layer an array
    "layer tokens keys" of distances from one selected key of a query to the next, which compress
    well; the first is from -1, and 0 stands for no key.
    """
    arrays: dict[str, Any] = {}
    for tokens, keys in sizes:
        if len(text) <= tokens:
            continue
        for layer, indices in selections(model, text, tokens=tokens, keys=keys).items():
            distances = indices.diff(dim=-1, prepend=torch.full_like(indices[:, :1], -1))
            distances.masked_fill_(indices < 0, 0)
            arrays[f"{layer} {tokens} {keys}"] = distances.cpu().numpy().astype(np.uint16)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)


def last_bits(points: Iterable[PaysPoint], variant: str) -> dict[int, float]:
    """Of each seed of a variant what its training ended with."""
    own = [point for point in points if point.variant == variant and point.step == point.steps]
    return {point.seed: point.bits_per_byte for point in own}


def difference(points: Iterable[PaysPoint]) -> tuple[float, float]:
    """Selected less dense, bits per byte at the end: its mean over the seeds that both have, and
    its standard error over them; NaN where they are too few.
    """
    dense, selected = (last_bits(points, variant) for variant in VARIANTS)
    each = [selected[seed] - dense[seed] for seed in sorted(dense.keys() & selected.keys())]
    mean = statistics.fmean(each) if each else math.nan
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return mean, error


def draw(points: list[PaysPoint]) -> Figure:
    """Bits per byte over the steps behind the first evaluation, a line for each training."""
    heading = "HybridLM with selected keys and with dense attention, lower is better"
    figure, (axes,) = figures.panels([""], heading=heading)
    for kind in dict.fromkeys(map(training_of, points)):
        own = [point for point in points if training_of(point) == kind and point.step]
        variant, *_ = kind
        label = f"{variant}, {own[0].keys:,} keys" if own else None
        steps, bits = [p.step for p in own], [p.bits_per_byte for p in own]
        axes.plot(steps, bits, marker=".", color=COLOURS[variant], label=label, alpha=0.8)
    figures.dress(axes, x="step", y="held-out bits per byte")
    figures.legend(figure)
    return figure


def main(
    variant: Annotated[Variant, typer.Option(help="Of attention: dense, or to selected keys.")],
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    preset: Annotated[HybridPresetName, typer.Option()] = "mini",
    steps: Annotated[int, typer.Option(min=1)] = 640,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=8)] = 2048,
    lr: Annotated[float, typer.Option()] = 1e-3,
    windows: Annotated[int, typer.Option(min=1, help="Of an evaluation.")] = 256,
    selections: Annotated[
        Path | None, typer.Option(help="File, .npz, of what the trained layers select.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Default: the standard library.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 0,
    device: Annotated[str, typer.Option()] = "cpu",
    backend: Annotated[Backend, typer.Option()] = "auto",
) -> None:
    """Train HybridLM with dense attention or with selected keys; write all evaluations."""
    flags: dict[str, Any] = dict(
        preset=preset,
        steps=steps,
        batch_size=batch_size,
        seq_len=seq_len,
        lr=lr,
        seed=seed,
        device=device,
        backend=backend,
        gradient_accumulation_steps=1,
        dataset_tokens=2**24,
        eval_every=max(1, steps // EVALUATIONS),
        log_every=max(1, steps // EVALUATIONS),
    )
    if dataset is not None:
        flags["dataset"] = dataset
    if variant == "dense":
        flags["indexer_warmup"] = steps
    console = Console(width=200)
    with usage_errors():
        where = checked_device(device)
        run = PaysRun.from_flags(flags)
        # Sizes that do not go together are told before the data is read.
        run.shape(256)
    points, model, text = train_and_evaluate(run, variant, windows=windows, console=console)
    if selections is not None:
        kept(model, text, selections, KEPT)
    file = out / f"selection-pays-{environment_name(where)}.csv"
    out.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        rows = beside(points, rows_before(PaysPoint, file), training_of)
        write(rows, file, draw, number=".5f")
    mean, error = difference(rows)
    console.print(
        f"selected - dense: {mean:+.5f} bits per byte, standard error {error:.5f} over seeds; "
        f"results in {file}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
