"""Everything that one run of ``fusewright-train titan-mac`` was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .presets import TITAN_MAC_PRESETS, TitanMACPresetName
from .text_run import TextRun
from .titan_mac import TitanMAC
from .titan_mac_config import TitanMACConfig, Variant


@dataclass(frozen=True, kw_only=True)
class TitanMACRun(TextRun):
    """A `TextRun` of TitanMAC."""

    model_name: ClassVar[str] = "titan-mac"
    title: ClassVar[str] = "TitanMAC"
    presets: ClassVar = TITAN_MAC_PRESETS

    preset: TitanMACPresetName
    variant: Variant
    dim: int
    num_layers: int
    num_heads: int
    chunk_size: int
    memory_chunk: int

    @classmethod
    def own_defaults(cls, shape: TitanMACConfig, steps: int) -> dict[str, Any]:
        return {
            "variant": shape.variant,
            "dim": shape.dim,
            "num_layers": shape.layers,
            "num_heads": shape.heads,
            "chunk_size": shape.segment,
            "memory_chunk": shape.memory_chunk,
        }

    @property
    def label(self) -> str:
        return self.variant

    def built(self, vocab_size: int) -> TitanMAC:
        config = replace(
            self.presets[self.preset].architecture,
            vocab_size=vocab_size,
            variant=self.variant,
            dim=self.dim,
            layers=self.num_layers,
            heads=self.num_heads,
            segment=self.chunk_size,
            memory_chunk=self.memory_chunk,
        )
        return TitanMAC(config, backend=self.backend)
