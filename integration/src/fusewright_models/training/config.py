"""How a model is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ..choices import PRECISIONS, SCHEDULES, Precision, Schedule

Capture = bool | Literal["auto"]


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        steps: optimizer steps in all; the schedule ends there.
        batch_size: what the source is asked for.
        accumulation_steps: batches whose mean gradient one optimizer step follows.
        warmup_steps: steps of linear warm-up.
        schedule: of the rate behind them: half a "cosine" or a line ("linear") down to zero, or
            "constant".
        clip_norm: largest 2-norm of all gradients together; longer ones are scaled down to it. An
            optimizer that clips inside its step has a limit of its own.
        precision: "fp32", or "bf16" for autocast over fp32 parameters.
        compile: put forward pass and loss through torch.compile.
        capture: replay steps from CUDA graphs; "auto" where that can be done.
        log_every: steps between two log points.
        evaluate_every: steps between two evaluations; the end has one.
        checkpoint_every: steps or time between two checkpoints; None for one with every evaluation.
            The end has one.
        keep: how many of the last checkpoints stay.
        profile: steps that a trace is written of.
    """

    steps: int
    batch_size: int
    accumulation_steps: int = 1
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    clip_norm: float = 1.0
    precision: Precision = "fp32"
    compile: bool = False
    capture: Capture = "auto"
    log_every: int = 10
    evaluate_every: int = 100
    checkpoint_every: int | timedelta | None = None
    keep: int = 2
    profile: range | None = None

    def __post_init__(self) -> None:
        counts = ["steps", "batch_size", "accumulation_steps", "log_every", "evaluate_every"]
        counts.append("keep")
        if isinstance(self.checkpoint_every, int):
            counts.append("checkpoint_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.profile is not None and self.profile[-1] > self.steps:
            raise ValueError(
                f"profile must be among the {self.steps} steps of the run; "
                f"got {self.profile[0]}:{self.profile[-1]}"
            )
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(f"warmup_steps must be 0 to {self.steps}; got {self.warmup_steps}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}; got {self.schedule!r}")
        if not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive; got {self.clip_norm}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}; got {self.precision!r}")
        if self.capture not in (True, False, "auto"):
            raise ValueError(f"capture must be True, False or 'auto'; got {self.capture!r}")


def interval(text: str) -> int | timedelta:
    """Steps, such as 500, or minutes, such as 10m.

    Raises:
        ValueError: it is neither, or nothing.
    """
    match = re.fullmatch(r"([0-9]+)(m?)", text)
    if match is None or int(match[1]) == 0:
        raise ValueError(
            "checkpoint_every must be a number of steps such as 500, or of minutes such as 10m; "
            f"got {text!r}"
        )
    return timedelta(minutes=int(match[1])) if match[2] else int(match[1])
