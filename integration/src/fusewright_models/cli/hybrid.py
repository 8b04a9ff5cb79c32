"""What the subcommand does that trains a HybridLM on text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..models.hybrid import Drafting, HybridConfig, HybridLM, Reading
from ..models.hybrid.config import check_recomputed_once
from ..text import Corpus, TextBatch, Windows
from ..training import Told
from .presets import HYBRID_PRESETS
from .run import LATER
from .settings import HybridSettings
from .text import TextRun, train_on_text


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
        return HybridBatch(**vars(self.windows.sample(batch)), dense=dense)

    def state_dict(self) -> dict[str, Any]:
        return self.windows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows.load_state_dict(state)


class HybridRun(HybridSettings, TextRun):
    """A `TextRun` of HybridLM."""

    title: ClassVar[str] = "HybridLM"
    presets: ClassVar = HYBRID_PRESETS
    later: ClassVar = LATER | {"indexer_form": "gated", "indexer_rotary": 0}

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
            "indexer_form": shape.form,
            "indexer_rotary": shape.index_rotary,
            "mode": shape.mode,
        }

    @property
    def label(self) -> str:
        return self.preset

    @property
    def rate_factors(self) -> dict[str, float]:
        return {} if self.indexer_rate == 1.0 else {".index_": self.indexer_rate}

    def shape(self, vocab_size: int) -> HybridConfig:
        return replace(
            self.presets[self.preset].architecture,
            vocab_size=vocab_size,
            layers=self.num_layers,
            k_base=self.selected_keys,
            index_temperature=self.indexer_temperature,
            form=self.indexer_form,
            index_rotary=self.indexer_rotary,
            mode=self.mode,
            checkpointing=self.checkpointing,
        )

    def built(self, vocab_size: int) -> HybridLM:
        return HybridLM(self.shape(vocab_size), backend=self.backend)

    def batch(self, windows: Tensor) -> HybridBatch:
        return HybridBatch(windows, dense=False)

    @property
    def counted_length(self) -> int:
        # Of a window of twice as many, plain torch's attention is to as many on average.
        return 2 * self.selected_keys

    def scored(self, model: HybridLM) -> Any:
        return SimpleNamespace(loss=model.next_token_loss)

    def reading(self, model: HybridLM) -> Reading:
        return Reading(model)

    def drafting(self, model: HybridLM) -> Drafting:
        return Drafting(model)

    def blocks(self, model: HybridLM) -> Iterable[nn.Module]:
        # A reversible stack wants its parameters whole.
        return model.stack.layers if self.mode == "plain" else ()

    def windows(self, corpus: Corpus) -> WarmedWindows:
        dense = self.indexer_warmup * self.gradient_accumulation_steps
        return WarmedWindows(self.drawn(corpus), dense)


def in_one_row(
    tokens: Tensor, targets: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Rows ``[B, T]`` of documents as one, ``[1, B T]``, with what the model is told of them."""
    rows, length = tokens.shape
    first = length * torch.arange(rows, device=tokens.device).unsqueeze(1)
    mask = torch.arange(length, device=tokens.device) < bounds[:, -1:]
    options = {"cu_seqlens": (bounds + first).flatten(), "mask": mask.view(1, -1)}
    return tokens.reshape(1, -1), targets.reshape(1, -1), options | {"max_seqlen": length}


def all_losses(model: HybridLM, batch: HybridBatch) -> Told:
    """The loss to train on, its parts, and whether the stack's states left their range."""
    tokens, targets = batch.windows[:, :-1], batch.targets
    options: dict[str, Any] = {}
    if batch.bounds is not None:
        tokens, targets, options = in_one_row(tokens, targets, batch.bounds)
    losses = model(tokens, targets, dense=batch.dense, **options)
    following, second = batch.share(losses.following), batch.share(losses.second, ahead=2)
    total = losses.total
    if batch.predicted is not None:
        weight = getattr(model, "module", model).config.second_weight
        total = total + (following - losses.following) + weight * (second - losses.second)
    means = {
        "next_token_loss": following,
        "second_token_loss": second,
        "indexer_loss": losses.indexer,
        "selected_keys": losses.selected,
    }
    return Told(total, means, {"saturated_batches": losses.saturated})


def train_hybrid(flags: dict[str, Any]) -> None:
    """Begin or continue the run of HybridLM that the flags ask for."""
    train_on_text(HybridRun, all_losses, flags)
