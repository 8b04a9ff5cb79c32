"""What the subcommand does that trains a TitanMAC on text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ..models.titan_mac import TitanMAC, TitanMACConfig
from ..text import TextBatch
from .presets import TITAN_MAC_PRESETS
from .run import LATER
from .settings import TitanMACSettings
from .text import BYTES, TextRun, train_on_text


class TitanMACRun(TitanMACSettings, TextRun):
    """A `TextRun` of TitanMAC."""

    title: ClassVar[str] = "TitanMAC"
    presets: ClassVar = TITAN_MAC_PRESETS
    later: ClassVar = LATER | {
        "memory_rule": "paper",
        "memory_length": 100.0,
        "memory_layers": 2,
    }

    @classmethod
    def own_defaults(cls, shape: TitanMACConfig, steps: int) -> dict[str, Any]:
        return {name: getattr(shape, field) for name, field in SHAPE_FIELDS.items()}

    @property
    def label(self) -> str:
        return self.variant

    @property
    def document_unit(self) -> int:
        return self.shape(BYTES).document_unit

    @property
    def counted_length(self) -> int:
        return self.chunk_size

    def shape(self, vocab_size: int) -> TitanMACConfig:
        chosen: dict[str, Any] = {
            field: getattr(self, name) for name, field in SHAPE_FIELDS.items()
        }
        shape = self.presets[self.preset].architecture
        recomputed = self.checkpointing == "block"
        return replace(shape, vocab_size=vocab_size, checkpointing=recomputed, **chosen)

    def built(self, vocab_size: int) -> TitanMAC:
        return TitanMAC(self.shape(vocab_size), backend=self.backend)


# Which field of the model's shape a flag sets.
SHAPE_FIELDS = {
    "variant": "variant",
    "dim": "dim",
    "num_layers": "layers",
    "num_heads": "heads",
    "chunk_size": "segment",
    "memory_chunk": "memory_chunk",
    "memory_rule": "memory_rule",
    "memory_layers": "memory_layers",
    "memory_length": "memory_length",
}


def next_token_loss(model: TitanMAC, batch: TextBatch) -> Tensor:
    """Minus the mean of log p(token | those before it in its window), nats."""
    tokens = batch.windows[:, :-1]
    options: dict[str, Any] = {}
    if batch.bounds is not None:
        unit = getattr(model, "module", model).config.document_unit
        # What `PackedWindows` puts into a row finds place in its whole units.
        room = -(-tokens.shape[1] // unit) * unit
        options = {"cu_seqlens": batch.bounds, "room": room}
    return batch.share(model(tokens, targets=batch.targets, **options))


def train_titan_mac(flags: dict[str, Any]) -> None:
    """Begin or continue the run of TitanMAC that the flags ask for."""
    train_on_text(TitanMACRun, next_token_loss, flags)
