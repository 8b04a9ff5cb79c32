"""Does a memory last through its training? Thousands of steps on long sequences.

    python -m fusewright_models.studies.long_training --layers 2 --tokens 16384 --steps 2000

trains one NeuralMemory, between an embedding of bytes and their logits, on the source files of the
running Python's standard library, and writes what its stats tell every fifty steps: the inner loss
at the beginning and at the end of the sequences, and the tokens that were skipped. Rows of other
trainings that the file has stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from fusewright.attention import Backend
from fusewright.memory_mlp import MemoryStats, NeuralMemory
from fusewright.norm import RMSNorm
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from .. import figures
from .._core.typed import called_as
from ..choices import MemoryRule
from ..cli.commands import usage_errors
from ..cli.options import LARGEST_SEED
from ..devices import checked_device
from ..text import ByteTokenizer, Windows, documents, read_corpus
from ..text.windows import TextBatch
from ..training import Trainer, TrainingConfig, torch_adamw
from ..training.source import Told
from .recall import environment
from .results import beside, rows_before, write

BYTES = 256
HELD_OUT, MOST_TOKENS = 1 << 16, 1 << 26
# Of a sequence, at its beginning and at its end.
SHARE = 8
PAPER: dict[str, Any] = {"forget": "zero", "residual_norm": False, "memory_length": 100.0}


@dataclass(frozen=True)
class LongTraining:
    """A training.

    Attributes:
        layers: of the memory.
        tokens: of a sequence.
    """

    layers: int = 2
    tokens: int = 4096
    steps: int = 8000
    memory_rule: MemoryRule = "normed"
    batch_size: int = 4
    dim: int = 128
    hidden: int = 128
    chunk: int = 64
    lr: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class LongPoint:
    """The means of some steps: a row of the result file.

    Attributes:
        loss: of the bytes, nats.
        inner_loss_first, inner_loss_last: |M(k) - v|^2 over the first and the last eighth of the
            sequences.
        skipped: tokens that the memory did not write.
    """

    layers: int
    tokens: int
    memory_rule: str
    seed: int
    step: int
    loss: float
    inner_loss_first: float
    inner_loss_last: float
    skipped: int


def training_of(point: LongPoint) -> tuple[int, int, str, int]:
    return point.layers, point.tokens, point.memory_rule, point.seed


class MemoryModel(nn.Module):
    """logits = (x + memory(N(x))) W, x being the embedding of the bytes."""

    def __init__(self, training: LongTraining, *, backend: Backend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, training.dim)
        self.norm = RMSNorm(training.dim, backend=backend)
        options = PAPER if training.memory_rule == "paper" else {}
        self.memory = NeuralMemory(
            training.dim,
            heads=training.dim // 64 or 1,
            hidden=training.hidden,
            layers=training.layers,
            chunk=training.chunk,
            backend=backend,
            **options,
        )
        self.output_norm = RMSNorm(training.dim, backend=backend)
        self.logits = nn.Linear(training.dim, BYTES)

    def forward(self, tokens: Tensor) -> tuple[Tensor, MemoryStats]:
        """The logits of ``tokens [B, T]`` and what the memory's stats tell."""
        x = self.embedding(tokens)
        y, _, stats = self.memory(self.norm(x))
        return self.logits(self.output_norm(x + y)), stats

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...


def told_loss(model: MemoryModel, batch: TextBatch) -> Told:
    """The cross entropy of the next bytes, and the memory's stats."""
    logits, stats = model(batch.windows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
    few = max(1, stats.loss.shape[1] // SHARE)
    means = {
        "inner_loss_first": stats.loss[:, :few].mean(),
        "inner_loss_last": stats.loss[:, -few:].mean(),
    }
    return Told(loss, means, {"skipped": stats.skipped.sum()})


def train_long(
    training: LongTraining,
    *,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
    console: Console | None = None,
) -> list[LongPoint]:
    """Train one memory, and what its stats told on the way.

    Raises:
        FloatingPointError: a loss or a gradient was not finite.
    """
    sizes: dict[str, Any] = {
        "most_tokens": MOST_TOKENS,
        "held_out_bytes": HELD_OUT,
        "device": device,
    }
    corpus = read_corpus(documents(None), ByteTokenizer(), **sizes)
    source = Windows(corpus.training, length=training.tokens, seed=training.seed, device=device)
    torch.manual_seed(training.seed)
    model = MemoryModel(training, backend=backend).to(device)
    optimizer = torch_adamw(model, lr=training.lr, weight_decay=0.0)
    on_gpu = torch.device(device).type == "cuda"
    config = TrainingConfig(
        steps=training.steps,
        batch_size=training.batch_size,
        warmup_steps=training.steps // 20,
        precision="bf16" if on_gpu else "fp32",
        log_every=max(1, min(50, training.steps // 4)),
        evaluate_every=training.steps,
    )
    lines: list[dict[str, Any]] = []
    told: dict[str, Any] = {"console": console, "observe": lines.append}
    Trainer(model, source, told_loss, optimizer, config, None, **told).run()
    return [
        LongPoint(
            training.layers,
            training.tokens,
            training.memory_rule,
            training.seed,
            line["step"],
            line["loss"],
            line["inner_loss_first"],
            line["inner_loss_last"],
            line.get("skipped", 0),
        )
        for line in lines
        if "inner_loss_first" in line
    ]


def draw(points: list[LongPoint]) -> Figure:
    """A panel for each training: the inner loss at both ends of the sequences over the steps."""
    kinds = list(dict.fromkeys(map(training_of, points)))
    titles = [f"{layers} layers, {tokens:,} tokens, {rule}" for layers, tokens, rule, _ in kinds]
    heading = "TitanMAC: what its memory still misses as it reads, lower is better"
    figure, panels = figures.panels(titles, heading=heading)
    ends = ("first eighth", "inner_loss_first"), ("last eighth", "inner_loss_last")
    for axes, kind in zip(panels, kinds, strict=True):
        own = [point for point in points if training_of(point) == kind]
        for (end, name), colour in zip(ends, figures.CURVES, strict=False):
            losses = [getattr(p, name) for p in own]
            label = f"{end} of a sequence"
            axes.plot([p.step for p in own], losses, color=colour, label=label)
        figures.dress(axes, x="step")
    panels[0].set_ylabel("inner loss", fontsize=figures.TEXT)
    figures.legend(figure)
    return figure


def main(
    out: Annotated[Path, typer.Option(help="Folder of CSV and picture.")] = Path("."),
    layers: Annotated[int, typer.Option(min=1, help="Of the memory.")] = LongTraining.layers,
    tokens: Annotated[int, typer.Option(min=1, help="Of a sequence.")] = LongTraining.tokens,
    steps: Annotated[int, typer.Option(min=1)] = LongTraining.steps,
    memory_rule: Annotated[MemoryRule, typer.Option(help="normed or paper.")] = "normed",
    batch_size: Annotated[int, typer.Option(min=1)] = LongTraining.batch_size,
    dim: Annotated[int, typer.Option(min=1)] = LongTraining.dim,
    hidden: Annotated[int, typer.Option(min=1)] = LongTraining.hidden,
    lr: Annotated[float, typer.Option()] = LongTraining.lr,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED)] = 0,
    device: Annotated[str, typer.Option()] = "cpu",
    backend: Annotated[Backend, typer.Option()] = "auto",
) -> None:
    """Train a memory on long sequences; write what its stats tell."""
    console = Console()
    with usage_errors():
        if memory_rule == "origin":
            raise ValueError("memory_rule must be normed or paper; got origin")
        where = checked_device(device)
        training = LongTraining(
            layers,
            tokens,
            steps,
            memory_rule,
            batch_size,
            dim,
            hidden,
            lr=lr,
            seed=seed,
        )
        points = train_long(training, device=where, backend=backend, console=console)
    file = out / f"long-training-{environment(where)}.csv"
    rows = beside(points, rows_before(LongPoint, file), training_of)
    write(rows, file, draw, number=".5g")
    console.print(f"results in {file}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
