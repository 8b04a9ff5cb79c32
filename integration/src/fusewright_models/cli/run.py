"""A run of a model: its settings, and what they are of the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from ..training import (
    RunFolder,
    TrainingConfig,
    default_decay,
    default_rate,
    interval,
    steps_of,
    tensorboard_logger,
    wandb_logger,
)
from ..training.reporting.loggers import Logger
from .options import check_values
from .settings import Settings

# Fields of a run that a resumed one may have other than its checkpoint: where and how the same
# training runs, and paths of what is known again by its digest.
NOT_TRAINED = {
    "dataset",
    "dataset_revision",
    "cache",
    "tokenizer",
    "optimizer_weights",
    "device",
    "backend",
    "compile",
    "capture",
    "parallel",
    "pad",
    "checkpointing",
    "log_every",
    "eval_every",
    "eval_share",
    "checkpoint_every",
    "keep",
    "wandb",
    "wandb_project",
    "tensorboard",
    "profile",
    "memory_snapshot",
}

# Fields that runs of before do not have, and what these did.
LATER: dict[str, Any] = {
    "ahead": None,
    "frequencies": 0,
    "warmup_steps": None,
    "schedule": "cosine",
    "beta1": 0.9,
    "beta2": 0.95,
    "clip_norm": 1.0,
    "init_from": None,
    "documents": False,
    "documents_per_window": 1,
    "init_revision": None,
}


class Run(Settings):
    """The settings of a run, and what they are of the training.

    Attributes:
        presets: of the model, by name, the one of no flag "demo".
        later: fields that runs of before do not have, and what these did.
    """

    presets: ClassVar[Mapping[str, Any]]
    later: ClassVar[Mapping[str, Any]] = LATER

    def __post_init__(self) -> None:
        """
        Raises:
            TypeError: a field is of another type.
            ValueError: a field has a value that it cannot have, or two of them do not go together.
        """
        super().__post_init__()
        self.training()
        if self.init_revision is not None and self.init_from is None:
            raise ValueError(f"wanted --init-from beside --init-revision {self.init_revision}")

    @classmethod
    def from_flags(cls, flags: dict[str, Any]) -> Self:
        """The given flags over the preset's values.

        Raises:
            TypeError, ValueError: a value cannot be a setting's, or two of them do not go together.
        """
        check_values(cls, flags)
        name = flags.get("preset", "demo")
        preset = cls.presets[name]
        device = flags.get("device", "cuda" if torch.cuda.is_available() else "cpu")
        optimizer = flags.get("optimizer", "adamw")
        chosen = {
            "preset": name,
            "batch_size": preset.batch_size,
            "lr": default_rate(optimizer, preset.lr),
            "weight_decay": default_decay(optimizer, cls.decay),
            "steps": preset.steps,
            "eval_every": preset.evaluate_every,
            "device": device,
            "precision": "bf16" if device.startswith("cuda") else "fp32",
        }
        return cls(**cls.completed(preset, chosen | flags))

    @classmethod
    def completed(cls, preset: Any, chosen: dict[str, Any]) -> dict[str, Any]:
        """What is chosen, and the preset's values of the model's other fields."""
        return chosen

    @property
    def label(self) -> str:
        """What tells it from other runs of its model, in a folder's name."""
        raise NotImplementedError

    @property
    def rate_factors(self) -> Mapping[str, float]:
        """What the learning rate of parameters with such in their names is multiplied by."""
        return {}

    @property
    def choices(self) -> dict[str, Any]:
        """What its checkpoints were trained with."""
        found = asdict(self)
        as_ever = self.later.items() & found.items()
        return {
            name: value
            for name, value in found.items()
            if name not in NOT_TRAINED and (name, value) not in as_ever
        }

    def blocks(self, model: Any) -> Iterable[nn.Module]:
        """Parts of the model whose parameters are gathered on their own, where they are sharded."""
        return model.blocks

    def shape(self, size: int) -> Any:
        """Of the model, whose inputs are of that size: the vocabulary's, or an input's width.

        Raises:
            ValueError: the sizes do not go together.
        """
        raise NotImplementedError

    def check_shares(self, count: int) -> None:
        """
        Raises:
            ValueError: so many processes have not as many rows each.
        """
        if self.batch_size % count:
            raise ValueError(
                f"wanted a --batch-size of as many rows for each of {count} processes; "
                f"got {self.batch_size}"
            )

    @property
    def files(self) -> dict[str, bytes]:
        """What its folder has beside config.json from the start, by name."""
        return {}

    def loggers(self, folder: RunFolder, *, after: int | None) -> Iterator[Logger]:
        """What is shown the metrics beside the folder, from the step after that on; None is from
        the beginning on.
        """
        if self.wandb:
            yield wandb_logger(folder, project=self.wandb_project, config=asdict(self))
        if self.tensorboard:
            yield tensorboard_logger(folder, after=after)

    def training(self) -> TrainingConfig:
        every, warmup = self.checkpoint_every, self.warmup_steps
        return TrainingConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            accumulation_steps=self.gradient_accumulation_steps,
            warmup_steps=self.steps // 20 if warmup is None else warmup,
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            precision=self.precision,
            compile=self.compile,
            capture="auto" if self.capture is None else self.capture,
            log_every=self.log_every,
            evaluate_every=self.eval_every,
            checkpoint_every=None if every is None else interval(every),
            keep=self.keep,
            profile=None if self.profile is None else steps_of(self.profile),
        )


RunT = TypeVar("RunT", bound=Run)
