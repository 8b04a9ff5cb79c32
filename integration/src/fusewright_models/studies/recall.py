"""Does the memory earn its place? Models with and without it on key-value recall.

    python -m fusewright_models.studies.recall --out integration/results

trains a tiny MAC and LMM to recall pairs of key and value from further back than attention reaches,
each with its memory and, everything else the same, without; writes recall-ENVIRONMENT.csv with the
held-out accuracy of every evaluation, and the curves as a picture beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fusewright.attention import Backend
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from .. import figures
from ..cli.commands import usage_errors
from ..cli.options import LARGEST_SEED
from ..devices import checked_device
from ..models.titan_mac import TitanMAC, TitanMACConfig, Variant
from ..text.recall import KeyValueRecall, RecallBatch, recall_accuracy
from ..training import Trainer, TrainingConfig, torch_adamw
from .results import write

SHAPE = TitanMACConfig(
    dim=64,
    layers=2,
    heads=4,
    segment=8,
    persistent=4,
    memory_chunk=8,
    memory_heads=1,
    memory_hidden=64,
)
# The nearest pair is two segments away from the first question.
PAIRS, GAP, KEYS, VALUES = 4, 16, 16, 16
VARIANTS: tuple[Variant, ...] = ("mac", "lmm")
# No run can train on what it is scored on.
EVALUATION_SEED = LARGEST_SEED + 1
EVALUATION_BATCHES = 8


@dataclass(frozen=True)
class RecallTraining:
    """How long and how fast; what a model without memory gets, one with it gets, too."""

    steps: int = 1000
    batch_size: int = 32
    lr: float = 3e-3
    evaluate_every: int = 50


@dataclass(frozen=True)
class RecallPoint:
    """One evaluation of one model: a row of the result file."""

    variant: str
    memory: bool
    seed: int
    step: int
    accuracy: float
    chance: float


def recall_loss(model: TitanMAC, batch: RecallBatch) -> Tensor:
    """Minus the mean of log p(value) over the values that are asked for, nats."""
    return model.loss(batch.windows, targets=batch.targets)


def train_recall(
    variant: Variant,
    *,
    memory: bool,
    training: RecallTraining,
    seed: int = 0,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
    console: Console | None = None,
) -> list[RecallPoint]:
    """Train one model on the task; its accuracy at every evaluation."""
    task, held_out = (
        KeyValueRecall(pairs=PAIRS, gap=GAP, keys=KEYS, values=VALUES, device=device, seed=each)
        for each in (seed, EVALUATION_SEED)
    )
    torch.manual_seed(seed)
    shape = replace(SHAPE, variant=variant, memory=memory, vocab_size=task.vocab_size)
    model = TitanMAC(shape, backend=backend).to(device)

    def evaluation() -> dict[str, float]:
        batches, size = EVALUATION_BATCHES, training.batch_size
        return {"accuracy": recall_accuracy(model, held_out, batches=batches, batch_size=size)}

    lines: list[dict[str, Any]] = []
    optimizer = torch_adamw(model, lr=training.lr, weight_decay=0.0)
    config = TrainingConfig(
        steps=training.steps,
        batch_size=training.batch_size,
        warmup_steps=training.steps // 20,
        evaluate_every=training.evaluate_every,
    )
    told: dict[str, Any] = {"evaluate": evaluation, "console": console, "observe": lines.append}
    Trainer(model, task, recall_loss, optimizer, config, None, **told).run()
    return [
        RecallPoint(variant, memory, seed, line["step"], line["accuracy"], task.chance)
        for line in lines
        if "accuracy" in line
    ]


def draw(points: list[RecallPoint]) -> Figure:
    """A panel per variant: accuracy over steps with the memory and without it, and chance."""
    variants = list(dict.fromkeys(point.variant for point in points))
    heading = "TitanMAC: values recalled over the training, higher is better"
    figure, panels = figures.panels([v.upper() for v in variants], heading=heading, sharey=True)
    lines = (True, figures.CURVES[0], "memory"), (False, figures.NEUTRAL, "memory off")
    for axes, variant in zip(panels, variants, strict=True):
        for memory, colour, label in lines:
            of_this = [p for p in points if (p.variant, p.memory) == (variant, memory)]
            for seed in dict.fromkeys(p.seed for p in of_this):
                curve = [p for p in of_this if p.seed == seed]
                shares = [p.accuracy for p in curve]
                axes.plot([p.step for p in curve], shares, color=colour, label=label)
        axes.axhline(points[0].chance, color="k", linestyle=":", linewidth=1.0, label="chance")
        axes.set_ylim(0.0, 1.02)
        figures.dress(axes, x="step")
    panels[0].set_ylabel("values recalled", fontsize=figures.TEXT)
    figures.legend(figure)
    return figure


def environment(device: torch.device) -> str:
    """The device and torch's version, for a file's name."""
    name = device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(device).split()[-1].lower()
    return f"{name}-torch{'.'.join(torch.__version__.split('.')[:2])}"


def main(
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    variant: Annotated[Variant | None, typer.Option(help="Default: mac and lmm.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = RecallTraining.steps,
    batch_size: Annotated[int, typer.Option(min=1)] = RecallTraining.batch_size,
    lr: Annotated[float, typer.Option()] = RecallTraining.lr,
    eval_every: Annotated[int, typer.Option(min=1)] = RecallTraining.evaluate_every,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 0,
    device: Annotated[str, typer.Option()] = "cpu",
    backend: Annotated[Backend, typer.Option()] = "auto",
) -> None:
    """Train models with and without memory on key-value recall; write accuracies and curves."""
    console = Console()
    with usage_errors():
        where = checked_device(device)
        training = RecallTraining(steps, batch_size, lr, eval_every)
        shared: dict[str, Any] = dict(
            training=training, seed=seed, device=where, backend=backend, console=console
        )
        points = []
        for name in (variant,) if variant else VARIANTS:
            for memory in (True, False):
                console.print(f"{name}, memory {'on' if memory else 'off'}", highlight=False)
                points += train_recall(name, memory=memory, **shared)
    file = out / f"recall-{environment(where)}.csv"
    write(points, file, draw, number=".4f")
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
