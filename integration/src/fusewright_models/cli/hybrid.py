"""The subcommand that trains a HybridLM on text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import typer
from fusewright.reversible import Mode
from torch import Tensor, nn

from ..models.hybrid import HybridConfig, HybridLM
from ..models.hybrid.config import check_recomputed_once
from ..text import Corpus, TextBatch, Windows
from ..training import Told
from . import options
from .presets import HYBRID_PRESETS, HybridPresetName
from .text import TextRun, takes_text, train_on_text


@dataclass(frozen=True)
class HybridBatch(TextBatch):
    """B windows of consecutive tokens.

    Attributes:
        dense: attention goes to all keys, for the indexers to learn from it.
    """

    dense: bool


class WarmedWindows:
    """`Windows` whose first batches are dense. Which is which follows from their number, so that a
    step asks for nothing, and a resumed run has nothing more to restore.
    """

    def __init__(self, windows: Windows, dense: int) -> None:
        self.windows, self.dense = windows, dense

    def sample(self, batch: int) -> HybridBatch:
        dense = self.windows.batches < self.dense
        return HybridBatch(self.windows.sample(batch).windows, dense)

    def state_dict(self) -> dict[str, Any]:
        return self.windows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows.load_state_dict(state)


@dataclass(frozen=True)
class Reading:
    """The model as `generate` knows one."""

    model: HybridLM

    def __call__(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return self.model.read(tokens, state)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


@dataclass(frozen=True, kw_only=True)
class HybridRun(TextRun):
    """A `TextRun` of HybridLM."""

    model_name: ClassVar[str] = "hybrid"
    title: ClassVar[str] = "HybridLM"
    presets: ClassVar = HYBRID_PRESETS

    preset: Annotated[
        HybridPresetName, typer.Option(help="Sizes of model and training. Default: demo.")
    ]
    num_layers: Annotated[int, typer.Option(min=1, help="Every fourth is sparse attention.")]
    selected_keys: Annotated[int, typer.Option(min=1, help="That a typical query attends to.")]
    indexer_warmup: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps whose attention goes to all keys, so that indexers see what it looks for. "
            "Default: a tenth of all.",
        ),
    ]
    indexer_rate: Annotated[
        float, typer.Option(min=0.0, help="Of the indexers over the others'. Default: 1.")
    ]
    indexer_temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Where the indexers' own begin. Default: the preset's."),
    ]
    mode: Annotated[
        Mode,
        typer.Option(
            help="How states come back in the backward pass: recomputed, stored, or stored with "
            "all that autograd keeps. Default: exact."
        ),
    ]
    checkpointing: options.CheckpointingChoice = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_recomputed_once(self.mode, self.checkpointing)
        if self.seq_len < 2:
            raise ValueError(
                "seq_len must be at least 2, for a window to hold a token after next; "
                f"got {self.seq_len}"
            )
        shape = self.presets[self.preset].architecture
        if not shape.k_min <= self.selected_keys <= shape.k_max:
            raise ValueError(
                f"selected_keys must be from {shape.k_min} to {shape.k_max} in preset "
                f"{self.preset}; got {self.selected_keys}"
            )

    @classmethod
    def own_defaults(cls, shape: HybridConfig, steps: int) -> dict[str, Any]:
        return {
            "num_layers": shape.layers,
            "selected_keys": shape.k_base,
            "indexer_warmup": steps // 10,
            "indexer_rate": 1.0,
            "indexer_temperature": shape.index_temperature,
            "mode": shape.mode,
        }

    @property
    def label(self) -> str:
        return self.preset

    @property
    def rate_factors(self) -> dict[str, float]:
        return {} if self.indexer_rate == 1.0 else {".index_": self.indexer_rate}

    def built(self, vocab_size: int) -> HybridLM:
        config = replace(
            self.presets[self.preset].architecture,
            vocab_size=vocab_size,
            layers=self.num_layers,
            k_base=self.selected_keys,
            index_temperature=self.indexer_temperature,
            mode=self.mode,
            checkpointing=self.checkpointing,
        )
        return HybridLM(config, backend=self.backend)

    def scored(self, model: HybridLM) -> Any:
        return SimpleNamespace(loss=model.next_token_loss)

    def reading(self, model: HybridLM) -> Reading:
        return Reading(model)

    def blocks(self, model: HybridLM) -> Iterable[nn.Module]:
        # A reversible stack wants its parameters whole.
        return model.stack.layers if self.mode == "plain" else ()

    def windows(self, corpus: Corpus) -> WarmedWindows:
        dense = self.indexer_warmup * self.gradient_accumulation_steps
        return WarmedWindows(self.drawn(corpus), dense)


def all_losses(model: HybridLM, batch: HybridBatch) -> Told:
    """The loss to train on, its parts, and whether the stack's states left their range."""
    losses = model(batch.windows[:, :-1], batch.windows[:, 1:], dense=batch.dense)
    means = {
        "next_token_loss": losses.following,
        "second_token_loss": losses.second,
        "indexer_loss": losses.indexer,
        "selected_keys": losses.selected,
    }
    return Told(losses.total, means, {"saturated_batches": losses.saturated})


@takes_text(HybridRun)
def train_hybrid(**flags: Any) -> None:
    """Train a HybridLM: gated delta rule and learned sparse attention in a reversible stack.

    Without flags: bytes of the running Python's standard library, some minutes on two CPU cores.
    Prints the held-out bits per byte of the next token before and after, beside those of an order-2
    byte model fitted to the same training text, and a continuation of a held-out text; leaves a
    folder with config.json, metrics.jsonl, loss.png, sample.txt and checkpoints.
    """
    train_on_text(HybridRun, all_losses, flags)
