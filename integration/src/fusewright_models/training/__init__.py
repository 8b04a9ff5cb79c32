"""The training loop that all models share, its optimizers, and the folder that it fills."""

from __future__ import annotations

from .captured import captures
from .config import PRECISIONS, Precision, TrainingConfig
from .optimization import (
    OPTIMIZER_NAMES,
    OptimizerName,
    adamw,
    default_decay,
    default_rate,
    make_optimizer,
    torch_adamw,
    warmup_cosine,
)
from .processes import PARALLELS, Parallel, Processes
from .run_folder import RunFolder
from .source import Told
from .trainer import Trainer
from .wandb import wandb_observer

__all__ = [
    "OPTIMIZER_NAMES",
    "PARALLELS",
    "PRECISIONS",
    "OptimizerName",
    "Parallel",
    "Precision",
    "Processes",
    "RunFolder",
    "Told",
    "Trainer",
    "TrainingConfig",
    "adamw",
    "captures",
    "default_decay",
    "default_rate",
    "make_optimizer",
    "torch_adamw",
    "wandb_observer",
    "warmup_cosine",
]
