"""The training loop that all models share, its optimizers, and the folder that it fills."""

from __future__ import annotations

from ..choices import OPTIMIZER_NAMES, PARALLELS, PRECISIONS, OptimizerName, Parallel, Precision
from .captured import captures
from .config import TrainingConfig, interval
from .files import NotWritten
from .optimization import (
    adamw,
    default_decay,
    default_rate,
    make_optimizer,
    torch_adamw,
    warmup_cosine,
)
from .processes import Processes
from .reporting.loggers import tensorboard_library, tensorboard_logger, wandb_library, wandb_logger
from .reporting.profiling import memory_history, steps_of
from .run_folder import RunFolder
from .shortage import OutOfMemory
from .signals import StopSignals
from .source import Told
from .trainer import Trainer

__all__ = [
    "OPTIMIZER_NAMES",
    "PARALLELS",
    "PRECISIONS",
    "NotWritten",
    "OptimizerName",
    "OutOfMemory",
    "Parallel",
    "Precision",
    "Processes",
    "RunFolder",
    "StopSignals",
    "Told",
    "Trainer",
    "TrainingConfig",
    "adamw",
    "captures",
    "default_decay",
    "default_rate",
    "interval",
    "make_optimizer",
    "memory_history",
    "steps_of",
    "tensorboard_library",
    "tensorboard_logger",
    "torch_adamw",
    "wandb_library",
    "wandb_logger",
    "warmup_cosine",
]
