"""The subcommand that trains a TitanMAC on text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import typer
from torch import Tensor

from ..models.titan_mac import TitanMAC, TitanMACConfig, Variant
from ..text import TextBatch
from .presets import TITAN_MAC_PRESETS, TitanMACPresetName
from .text import TextRun, takes_text, train_on_text


@dataclass(frozen=True, kw_only=True)
class TitanMACRun(TextRun):
    """A `TextRun` of TitanMAC."""

    model_name: ClassVar[str] = "titan-mac"
    title: ClassVar[str] = "TitanMAC"
    presets: ClassVar = TITAN_MAC_PRESETS

    preset: Annotated[
        TitanMACPresetName, typer.Option(help="Sizes of model and training. Default: demo.")
    ]
    variant: Annotated[
        Variant, typer.Option(help="How the memory goes with attention. Default: mac.")
    ]
    dim: Annotated[int, typer.Option(min=1, help="Model width.")]
    num_layers: Annotated[int, typer.Option(min=1)]
    num_heads: Annotated[int, typer.Option(min=1)]
    chunk_size: Annotated[
        int, typer.Option(min=1, help="Segment of mac, window of mag and mal, in tokens.")
    ]
    memory_chunk: Annotated[
        int, typer.Option(min=1, help="Tokens whose memory gradients share their weights.")
    ]

    @classmethod
    def own_defaults(cls, shape: TitanMACConfig, steps: int) -> dict[str, Any]:
        return {name: getattr(shape, field) for name, field in SHAPE_FIELDS.items()}

    @property
    def label(self) -> str:
        return self.variant

    def built(self, vocab_size: int) -> TitanMAC:
        chosen: dict[str, Any] = {
            field: getattr(self, name) for name, field in SHAPE_FIELDS.items()
        }
        shape = self.presets[self.preset].architecture
        return TitanMAC(replace(shape, vocab_size=vocab_size, **chosen), backend=self.backend)


# Which field of the model's shape a flag sets.
SHAPE_FIELDS = {
    "variant": "variant",
    "dim": "dim",
    "num_layers": "layers",
    "num_heads": "heads",
    "chunk_size": "segment",
    "memory_chunk": "memory_chunk",
}


def next_token_loss(model: TitanMAC, batch: TextBatch) -> Tensor:
    """Minus the mean of log p(token | those before it in its window), nats."""
    return model(batch.windows[:, :-1], targets=batch.windows[:, 1:])


@takes_text(TitanMACRun)
def train_titan_mac(**flags: Any) -> None:
    """Train a TitanMAC: a language model with a neural memory that learns while it reads.

    Without flags: bytes of the running Python's standard library, some three minutes on two CPU
    cores. Prints the held-out bits per byte before and after, beside those of an order-2 byte model
    fitted to the same training text, and a continuation of a held-out text; leaves a folder with
    config.json, metrics.jsonl, loss.png, sample.txt and checkpoints.
    """
    train_on_text(TitanMACRun, next_token_loss, flags)
