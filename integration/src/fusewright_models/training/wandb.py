"""Metrics shown to Weights & Biases as well, where its extra is installed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ..extras import imported
from .run_folder import RunFolder

RUN_NUMBER = "wandb.txt"


def wandb_library() -> Any:
    """Raises:
    RuntimeError: the extra "wandb" is not installed.
    """
    return imported("wandb", extra="wandb", purpose="runs on Weights & Biases")


def wandb_observer(
    folder: RunFolder, *, project: str, config: dict[str, Any]
) -> Callable[[dict[str, Any]], None]:
    """What the training loop shows its metrics to: a run of that project, by the folder's name.

    A resumed folder continues the run that it began: the run's number is kept in wandb.txt.

    Raises:
        RuntimeError: the extra "wandb" is not installed.
    """
    wandb = wandb_library()
    file = folder.path / RUN_NUMBER
    if not file.exists():
        folder.write(RUN_NUMBER, secrets.token_hex(8).encode())
    run = wandb.init(
        project=project,
        name=folder.path.name,
        id=file.read_text(),
        resume="allow",
        config=config,
        dir=str(folder.path),
    )

    def observe(line: dict[str, Any]) -> None:
        run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    return observe
