"""How far back does a memory reach? Key-value recall over thousands of tokens.

    python -m fusewright_models.studies.far_recall --device cuda --out integration/results

trains a small model whose attention sees 512 tokens to recall 32 pairs of a key and one of 64
values, and asks for them 4,096 to 65,536 tokens later. What is learned of 4 pairs is the way to 8,
16 and 32, then of 1,100 tokens of noise the way to 8,192: once nine answers in ten are right, the
next task comes. Rows of other models that the file has stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from fusewright.attention import Backend
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from .. import figures
from ..choices import MemoryRule, Variant
from ..cli.commands import usage_errors
from ..cli.options import LARGEST_SEED
from ..devices import checked_device
from ..models.titan_mac import TitanMAC, TitanMACConfig
from ..text.recall import KeyValueRecall, RecallBatch, recall_accuracy
from ..training import Trainer, TrainingConfig, torch_adamw
from .recall import EVALUATION_SEED, environment
from .results import beside, rows_before, write

SHAPE = TitanMACConfig(
    dim=128,
    layers=2,
    heads=4,
    segment=512,
    persistent=4,
    memory_chunk=16,
    memory_heads=2,
    memory_hidden=128,
)
KEYS = VALUES = 64
# Pairs, and tokens of noise between them and the questions. The nearest pair is beyond what two
# layers of attention see.
LEVELS = ((4, 1100), (8, 1100), (16, 1100), (32, 1100), (32, 2048), (32, 4096), (32, 8192))
GAPS = (4096, 8192, 16384, 65536)
# Of the batches that decide on the next task, and on the end of the training.
LOOKED_AT, MASTERED, LEARNED = 10, 0.9, 0.96
# Rows that are scored at once, tokens of them, and batches.
TOKENS_AT_ONCE, BATCHES = 1 << 18, 8


@dataclass(frozen=True)
class FarTraining:
    """How long and how fast."""

    steps: int = 2500
    batch_size: int = 32
    lr: float = 2e-3
    warmup_steps: int = 100


@dataclass(frozen=True)
class FarPoint:
    """One trained model asked over one distance: a row of the result file.

    Attributes:
        memory_rule: of `TitanMACConfig`, or "none" without a memory.
        steps: of the training, up to where it had learned or diverged, or all.
        level: how many of `LEVELS` came up.
        outcome: "learned", "unfinished" or "diverged".
        gap: tokens between pairs and questions.
        accuracy: the share of right answers; 0 after it diverged.
        weight_norm: the mean over memories of the norm of their weights after the last token.
    """

    variant: str
    memory_rule: str
    memory_length: float
    seed: int
    steps: int
    level: int
    outcome: str
    gap: int
    accuracy: float
    chance: float
    weight_norm: float


@dataclass(eq=False)
class Curriculum:
    """Batches of the first level, then of those behind it once it is mastered.

    Attributes:
        levels: numbers of pairs and of tokens between.
        seed: of all batches.
        device: where they are made.
        level: which comes now.
        shares: of right answers in its batches since it was looked at, which comes once in
            `LOOKED_AT` batches: the host waits for the device then.
    """

    levels: Sequence[tuple[int, int]]
    seed: int
    device: torch.device | str
    level: int = 0
    shares: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = [
            task_of(pairs, gap, self.device, seed=self.seed + place)
            for place, (pairs, gap) in enumerate(self.levels)
        ]

    def sample(self, batch: int) -> RecallBatch:
        if len(self.shares) == LOOKED_AT:
            if self.level + 1 < len(self.levels) and self.learned(MASTERED):
                self.level += 1
            self.shares.clear()
        return self.tasks[self.level].sample(batch)

    def learned(self, share: float) -> bool:
        """Whether so many of the last answers were right; not, between two looks."""
        if len(self.shares) < LOOKED_AT:
            return False
        return float(torch.stack(self.shares).mean()) > share  # sync: which task comes next

    def finished(self) -> bool:
        """Whether the last level is learned."""
        return self.level + 1 == len(self.levels) and self.learned(LEARNED)

    def loss(self, model: TitanMAC, batch: RecallBatch) -> Tensor:
        """Minus the mean of log p(value) over the values that are asked for, nats."""
        pairs = self.levels[self.level][0]
        hidden, _ = model(batch.windows[:, :-1])
        logits = model.logits(hidden[:, -pairs:]).float().flatten(0, 1)
        answers = batch.targets[:, -pairs:].flatten()
        self.shares.append((logits.detach().argmax(-1) == answers).float().mean())
        return torch.nn.functional.cross_entropy(logits, answers)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "batches": [task.batches for task in self.tasks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.level = state["level"]
        for task, batches in zip(self.tasks, state["batches"], strict=True):
            task.batches = batches


def task_of(pairs: int, gap: int, device: torch.device | str, *, seed: int) -> KeyValueRecall:
    return KeyValueRecall(pairs=pairs, gap=gap, keys=KEYS, values=VALUES, device=device, seed=seed)


def train_far_recall(
    shape: TitanMACConfig,
    *,
    training: FarTraining,
    levels: Sequence[tuple[int, int]] = LEVELS,
    gaps: Sequence[int] = GAPS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
    console: Console | None = None,
) -> list[FarPoint]:
    """Train one model, and ask it over every distance."""
    source = Curriculum(levels, seed, device)
    torch.manual_seed(seed)
    model = TitanMAC(shape, backend=backend).to(device)
    optimizer = torch_adamw(model, lr=training.lr, weight_decay=0.0, betas=(0.9, 0.98))
    on_gpu = torch.device(device).type == "cuda"
    config = TrainingConfig(
        steps=training.steps,
        batch_size=training.batch_size,
        warmup_steps=min(training.warmup_steps, training.steps),
        schedule="constant",
        precision="bf16" if on_gpu else "fp32",
        # The next task comes when the last one is mastered.
        capture=False,
        log_every=LOOKED_AT,
        evaluate_every=training.steps,
    )
    trainer = Trainer(model, source, source.loss, optimizer, config, None, console=console)
    outcome = "unfinished"
    try:
        trainer.run(stop=source.finished)
    except FloatingPointError:
        outcome = "diverged"
    else:
        if source.finished():
            outcome = "learned"
    model.eval()
    pairs = levels[-1][0]
    points = []
    for gap in gaps:
        held_out = task_of(pairs, gap, device, seed=EVALUATION_SEED)
        accuracy, norm = 0.0, math.nan
        if outcome != "diverged":
            rows = max(1, min(training.batch_size, TOKENS_AT_ONCE // gap))
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                sizes = {"batches": BATCHES, "batch_size": rows}
                accuracy = recall_accuracy(model, held_out, **sizes)
                norm = weight_norm(model, held_out.sample(1).windows[:, :-1])
        points.append(
            FarPoint(
                shape.variant,
                shape.memory_rule if shape.memory else "none",
                shape.memory_length if shape.memory else 0.0,
                seed,
                trainer.step,
                source.level + 1,
                outcome,
                gap,
                accuracy,
                held_out.chance,
                norm,
            )
        )
    return points


@torch.no_grad()
def weight_norm(model: TitanMAC, tokens: Tensor) -> float:
    """The mean norm of the memories' weights after these tokens; NaN without memories."""
    _, state = model(tokens)
    layers = [layer for block in state.blocks for layer in block]
    norms = [layer.memory.weight_norm().mean() for layer in layers if layer.memory is not None]
    return float(torch.stack(norms).mean()) if norms else math.nan  # sync: the result


def draw(points: list[FarPoint]) -> Figure:
    """A panel per variant: accuracy over distance, a line for each rule and seed, and chance."""
    variants = list(dict.fromkeys(point.variant for point in points))
    rules = sorted({(p.memory_rule, p.memory_length) for p in points})
    with_memory = [rule for rule in rules if rule[0] != "none"]
    colours = dict(zip(with_memory, figures.CURVES, strict=False))
    heading = "TitanMAC: values recalled over the distance, higher is better"
    figure, panels = figures.panels([v.upper() for v in variants], heading=heading, sharey=True)
    for axes, variant in zip(panels, variants, strict=True):
        for rule, length in rules:
            colour = colours.get((rule, length), figures.NEUTRAL)
            kind = variant, rule, length
            of_rule = [p for p in points if (p.variant, p.memory_rule, p.memory_length) == kind]
            name = "memory off" if rule == "none" else f"{rule}, memory length {length:,g}"
            for seed in dict.fromkeys(p.seed for p in of_rule):
                line = sorted((p for p in of_rule if p.seed == seed), key=lambda p: p.gap)
                gaps, shares = [p.gap for p in line], [p.accuracy for p in line]
                axes.plot(gaps, shares, marker="o", markersize=4, color=colour, label=name)
        axes.axhline(points[0].chance, color="k", linestyle=":", linewidth=1.0, label="chance")
        axes.set_xscale("log", base=2)
        gaps = sorted({p.gap for p in points if p.variant == variant})
        axes.set_xticks(gaps, [f"{gap:,}" for gap in gaps])
        axes.set_ylim(0.0, 1.02)
        figures.dress(axes, x="tokens between a pair and its question")
    panels[0].set_ylabel("values recalled", fontsize=figures.TEXT)
    figures.legend(figure)
    return figure


def main(
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    variant: Annotated[Variant, typer.Option()] = "mal",
    memory_rule: Annotated[MemoryRule, typer.Option()] = "normed",
    memory_length: Annotated[float, typer.Option(min=1.0)] = SHAPE.memory_length,
    memory: Annotated[bool, typer.Option(help="Or the same model without.")] = True,
    steps: Annotated[int, typer.Option(min=1, help="At most.")] = FarTraining.steps,
    batch_size: Annotated[int, typer.Option(min=1)] = FarTraining.batch_size,
    lr: Annotated[float, typer.Option()] = FarTraining.lr,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 0,
    device: Annotated[str, typer.Option()] = "cpu",
    backend: Annotated[Backend, typer.Option()] = "auto",
) -> None:
    """Train a model on recall over thousands of tokens; write how far back it recalls."""
    console = Console()
    with usage_errors():
        where = checked_device(device)
        shape = shape_of(variant, memory_rule, memory_length, memory=memory)
        points = train_far_recall(
            shape,
            training=FarTraining(steps, batch_size, lr),
            seed=seed,
            device=where,
            backend=backend,
            console=console,
        )
    file = out / f"far-recall-{environment(where)}.csv"
    write(with_others(points, file), file, draw, number=".4f")
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


def shape_of(variant: Variant, rule: MemoryRule, length: float, *, memory: bool) -> TitanMACConfig:
    return replace(
        SHAPE,
        variant=variant,
        memory_rule=rule,
        memory_length=length,
        memory=memory,
        vocab_size=task_of(1, 0, "cpu", seed=0).vocab_size,
    )


def with_others(points: list[FarPoint], file: Path) -> list[FarPoint]:
    """The rows, and those of other models that the file has."""

    def model(point: FarPoint) -> tuple[Any, ...]:
        return point.variant, point.memory_rule, point.memory_length, point.seed

    rows = beside(points, rows_before(FarPoint, file), model)
    return sorted(rows, key=lambda p: (*model(p), p.gap))


if __name__ == "__main__":
    typer.run(main)
