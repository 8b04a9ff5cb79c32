"""How a model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "bf16"]
PRECISIONS = get_args(Precision)
Capture = bool | Literal["auto"]


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        steps: optimizer steps in all; the cosine ends there.
        batch_size: what the source is asked for.
        accumulation_steps: batches whose mean gradient one optimizer step follows.
        warmup_steps: steps of linear warm-up.
        clip_norm: largest 2-norm of all gradients together; longer ones are scaled down to it. An
            optimizer that clips inside its step has a limit of its own.
        precision: "fp32", or "bf16" for autocast over fp32 parameters.
        compile: put forward pass and loss through torch.compile.
        capture: replay steps from CUDA graphs; "auto" where that can be done.
        log_every: steps between two log points.
        evaluate_every: steps between two evaluations, each with a checkpoint; the end has both.
    """

    steps: int
    batch_size: int
    accumulation_steps: int = 1
    warmup_steps: int = 0
    clip_norm: float = 1.0
    precision: Precision = "fp32"
    compile: bool = False
    capture: Capture = "auto"
    log_every: int = 10
    evaluate_every: int = 100

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulation_steps", "log_every", "evaluate_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps must be 0 to {self.steps}; got {self.warmup_steps}")
        if not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive; got {self.clip_norm}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}; got {self.precision!r}")
        if self.capture not in (True, False, "auto"):
            raise ValueError(f"capture must be True, False or 'auto'; got {self.capture!r}")
