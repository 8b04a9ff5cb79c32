"""What one run of a language model was asked for, whatever the model: its text, its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from fusewright.attention import Backend
from torch import nn

from .presets import TextPreset
from .run_fields import check_fields
from .text import Corpus, Windows, documents, make_tokenizer, read_corpus
from .text.evaluation import LanguageModel
from .text.generation import StreamingModel
from .training import OptimizerName, Precision, TrainingConfig, default_decay, default_rate
from .training.source import Source

# A data set is read until it has the tokens that the run reads, but at least and at most these:
# fewer would leave too little held out, more would not fit beside the model.
FEWEST_TOKENS, MOST_TOKENS = 2**26, 2**30


@dataclass(frozen=True, kw_only=True)
class TextRun:
    """One run with nothing left open: what config.json holds and what --resume takes up again.

    ``vocab_size`` None is that of the tokenizer, ``dataset`` None the standard library,
    ``tokenizer`` None bytes. A model's own run adds the sizes that flags may change.

    Attributes:
        presets: of the model, by name, the one of no flag "demo".
        title: of the model, for people.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field has a value that it cannot have, whatever the others are.
    """

    model_name: ClassVar[str]
    title: ClassVar[str]
    presets: ClassVar[Mapping[Any, TextPreset[Any]]]

    preset: str
    seq_len: int
    batch_size: int
    gradient_accumulation_steps: int
    lr: float
    weight_decay: float
    max_steps: int
    dataset_tokens: int
    eval_every: int
    device: str
    mixed_precision: Precision
    vocab_size: int | None = None
    dataset: str | None = None
    dataset_subset: str | None = None
    text_column: str = "text"
    tokenizer: str | None = None
    optimizer: OptimizerName = "adamw"
    optimizer_weights: str | None = None
    seed: int = 0
    compile: bool = False
    capture: bool | None = None
    backend: Backend = "auto"
    log_every: int = 10
    wandb: bool = False
    wandb_project: str = "fusewright"

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> Self:
        """The given flags over the preset's values."""
        name = flags.get("preset", "demo")
        preset = cls.presets[name]
        device = flags.get("device", "cuda" if torch.cuda.is_available() else "cpu")
        optimizer = flags.get("optimizer", "adamw")
        defaults = {
            "preset": name,
            "seq_len": preset.seq_len,
            "batch_size": preset.batch_size,
            "gradient_accumulation_steps": preset.gradient_accumulation_steps,
            "lr": default_rate(optimizer, preset.lr),
            "weight_decay": default_decay(optimizer, 0.1),
            "max_steps": preset.steps,
            "eval_every": preset.evaluate_every,
            "device": device,
            "mixed_precision": "bf16" if device.startswith("cuda") else "fp32",
        }
        chosen = defaults | flags
        sizes = ("max_steps", "gradient_accumulation_steps", "batch_size", "seq_len")
        steps, batches, windows, length = (chosen[size] for size in sizes)
        read = min(max(steps * batches * windows * length, FEWEST_TOKENS), MOST_TOKENS)
        own = cls.own_defaults(preset.architecture, steps)
        return cls(**({"dataset_tokens": read} | own | chosen))

    @classmethod
    def own_defaults(cls, shape: Any, steps: int) -> dict[str, Any]:
        """Of the model's own fields, for a preset's architecture and a run of so many steps."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """What tells it from other runs of its model, in a folder's name."""
        raise NotImplementedError

    def built(self, vocab_size: int) -> nn.Module:
        """The model over a vocabulary of that size, on the default device.

        Raises:
            ValueError: the sizes do not go together.
        """
        raise NotImplementedError

    def scored(self, model: Any) -> LanguageModel:
        """What evaluations ask for a loss."""
        return model

    def reading(self, model: Any) -> StreamingModel:
        """What continues a text."""
        return model

    def model(self, tokens: int, *, device: torch.device | str | None = None) -> Any:
        """The model of this run, over a tokenizer's vocabulary of that size, on the run's device
        or another.

        Raises:
            ValueError: ``vocab_size`` is smaller, or the sizes do not go together.
        """
        vocab_size = tokens if self.vocab_size is None else self.vocab_size
        if vocab_size < tokens:
            raise ValueError(
                f"the tokenizer has {tokens} tokens; got --vocab-size {vocab_size}, which is less"
            )
        torch.manual_seed(self.seed)
        return self.built(vocab_size).to(device or self.device)

    def corpus(self) -> Corpus:
        return read_corpus(
            documents(self.dataset, subset=self.dataset_subset, column=self.text_column),
            make_tokenizer(self.tokenizer),
            most_tokens=self.dataset_tokens,
            held_out_bytes=self.presets[self.preset].held_out_bytes,
            device=self.device,
        )

    @property
    def rate_factors(self) -> dict[str, float]:
        """What the learning rate of parameters with such in their names is multiplied by."""
        return {}

    def windows(self, corpus: Corpus) -> Source[Any]:
        return Windows(corpus.training, length=self.seq_len, seed=self.seed, digest=corpus.digest)

    def training(self) -> TrainingConfig:
        return TrainingConfig(
            steps=self.max_steps,
            batch_size=self.batch_size,
            accumulation_steps=self.gradient_accumulation_steps,
            warmup_steps=self.max_steps // 20,
            precision=self.mixed_precision,
            compile=self.compile,
            capture="auto" if self.capture is None else self.capture,
            log_every=self.log_every,
            evaluate_every=self.eval_every,
        )
