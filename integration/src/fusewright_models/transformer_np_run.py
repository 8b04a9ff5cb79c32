"""Everything that one run of the command line was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from fusewright.attention import Backend
from fusewright.mixture_head import Scale

from .data import DataName, Sampler, Size, make_sampler
from .presets import TRANSFORMER_NP, PresetName
from .run_fields import LARGEST_SEED, check_fields
from .training import OptimizerName, Precision, TrainingConfig, default_decay, default_rate
from .transformer_np import TransformerNP
from .transformer_np_layers import Norm, TransformerNPConfig

# Every run on the same kind of data is scored on the same tasks; no run can train on them.
EVALUATION_SEED = LARGEST_SEED + 1


@dataclass(frozen=True)
class TransformerNPRun:
    """One run with nothing left open: what config.json holds and what --resume takes up again.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field has a value that it cannot have, whatever the others are.
    """

    model_name: ClassVar[str] = "transformer-np"
    rate_factors: ClassVar[Mapping[str, float]] = {}

    preset: PresetName
    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    eval_every: int
    device: str
    precision: Precision
    data: DataName = "digits"
    context_size: str | None = None
    target_size: str | None = None
    ragged: bool = False
    norm: Norm = "pre"
    scale: Scale = "log_sigma"
    indicator: bool = False
    optimizer: OptimizerName = "adamw"
    optimizer_weights: str | None = None
    seed: int = 0
    compile: bool = False
    capture: bool | None = None
    backend: Backend = "auto"
    log_every: int = 10

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> TransformerNPRun:
        """The given flags over the preset's values."""
        name = flags.get("preset", "demo")
        preset = TRANSFORMER_NP[name]
        device = flags.get("device", "cuda" if torch.cuda.is_available() else "cpu")
        optimizer = flags.get("optimizer", "adamw")
        defaults = {
            "preset": name,
            "steps": preset.steps,
            "batch_size": preset.batch_size,
            "lr": default_rate(optimizer, preset.lr),
            "weight_decay": default_decay(optimizer, 0.01),
            "eval_every": preset.evaluate_every,
            "device": device,
            "precision": "bf16" if device.startswith("cuda") else "fp32",
        }
        return cls(**(defaults | flags))

    @property
    def label(self) -> str:
        """What tells it from other runs of its model, in a folder's name."""
        return self.data

    def sampler(self, *, held_out: bool) -> Sampler:
        sizes = {
            name: None if text is None else Size.parse(text)
            for name, text in (
                ("context_size", self.context_size),
                ("target_size", self.target_size),
            )
        }
        seed = EVALUATION_SEED if held_out else self.seed
        return make_sampler(
            self.data,
            held_out=held_out,
            # Scores are of whole batches of one size, whatever the training shows.
            ragged=self.ragged and not held_out,
            device=self.device,
            seed=seed,
            **sizes,
        )

    def model(self, x_width: int) -> TransformerNP:
        torch.manual_seed(self.seed)
        config = TransformerNPConfig(
            **TRANSFORMER_NP[self.preset].architecture,
            x_width=x_width,
            norm=self.norm,
            scale=self.scale,
            indicator=self.indicator,
        )
        return TransformerNP(config, backend=self.backend).to(self.device)

    def training(self) -> TrainingConfig:
        return TrainingConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            warmup_steps=self.steps // 20,
            precision=self.precision,
            compile=self.compile,
            capture="auto" if self.capture is None else self.capture,
            log_every=self.log_every,
            evaluate_every=self.eval_every,
        )
