"""Everything that one run of ``fusewright-train hybrid`` was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fusewright.reversible import Mode
from torch import Tensor

from .hybrid import HybridLM
from .hybrid_config import HybridConfig
from .presets import HYBRID_PRESETS, HybridPresetName
from .text import Corpus, Windows
from .text_run import TextRun


@dataclass(frozen=True)
class HybridBatch:
    """B windows of consecutive tokens, ``[B, T + 1]``.

    Attributes:
        dense: attention goes to all keys, for the indexers to learn from it.
    """

    windows: Tensor
    dense: bool

    @property
    def tokens(self) -> int:
        """B T, the tokens that the model reads."""
        return self.windows.shape[0] * (self.windows.shape[1] - 1)


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
class NextToken:
    """The model as evaluations know one: its loss is that of the next token alone."""

    model: HybridLM

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model.next_token_loss(tokens)


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

    preset: HybridPresetName
    num_layers: int
    selected_keys: int
    indexer_warmup: int
    indexer_rate: float
    indexer_temperature: float
    mode: Mode

    def __post_init__(self) -> None:
        super().__post_init__()
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
        )
        return HybridLM(config, backend=self.backend)

    def scored(self, model: HybridLM) -> NextToken:
        return NextToken(model)

    def reading(self, model: HybridLM) -> Reading:
        return Reading(model)

    def windows(self, corpus: Corpus) -> WarmedWindows:
        windows = Windows(
            corpus.training, length=self.seq_len, seed=self.seed, digest=corpus.digest
        )
        return WarmedWindows(windows, self.indexer_warmup * self.gradient_accumulation_steps)
