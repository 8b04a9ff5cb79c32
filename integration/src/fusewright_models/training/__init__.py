"""The training loop that all models share, and the folder that it fills."""

from __future__ import annotations

from .optimization import adamw, warmup_cosine
from .run_folder import RunFolder
from .trainer import PRECISIONS, Precision, Trainer, TrainingConfig
from .wandb import wandb_observer

__all__ = [
    "PRECISIONS",
    "Precision",
    "RunFolder",
    "Trainer",
    "TrainingConfig",
    "adamw",
    "wandb_observer",
    "warmup_cosine",
]
