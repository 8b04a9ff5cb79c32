"""The training loop that all models share, and the folder that it fills."""

from __future__ import annotations

from .optimization import adamw, warmup_cosine
from .run_folder import RunFolder
from .trainer import PRECISIONS, Precision, Trainer, TrainingConfig

__all__ = [
    "PRECISIONS",
    "Precision",
    "RunFolder",
    "Trainer",
    "TrainingConfig",
    "adamw",
    "warmup_cosine",
]
