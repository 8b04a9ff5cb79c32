"""Where lines of metrics are shown beside the run's folder. A logger is entered for as long as the
training goes on, and is what lines are shown to.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from ...extras import imported
from ..run_folder import RunFolder

Observer = Callable[[dict[str, Any]], None]
Logger = AbstractContextManager[Observer]

RUN_NUMBER, EVENTS = "wandb.txt", "tensorboard"


def wandb_library() -> Any:
    """Raises:
    RuntimeError: the extra "wandb" is not installed.
    """
    return imported("wandb", extra="wandb", purpose="runs on Weights & Biases")


def tensorboard_library() -> Any:
    """Raises:
    RuntimeError: the extra "tensorboard" is not installed.
    """
    imported("tensorboard", extra="tensorboard", purpose="events for TensorBoard")
    # Torch's writer, which imports that one.
    return import_module("torch.utils.tensorboard")


@contextmanager
def wandb_logger(folder: RunFolder, *, project: str, config: dict[str, Any]) -> Iterator[Observer]:
    """Metrics on Weights & Biases: a run of that project, by the folder's name.

    A resumed folder continues the run that it began: the run's number is kept in wandb.txt.

    Raises:
        RuntimeError: the extra "wandb" is not installed, or the run cannot begin there.
    """
    wandb = wandb_library()
    file = folder.path / RUN_NUMBER
    if not file.exists():
        folder.write(RUN_NUMBER, secrets.token_hex(8).encode())
    options = {"id": file.read_text(), "resume": "allow", "config": config}
    try:
        run = wandb.init(project=project, name=folder.path.name, dir=str(folder.path), **options)
    # Its errors have no kind in common with others.
    except Exception as error:
        raise RuntimeError(
            f"Weights & Biases began no run: {error}; WANDB_MODE=offline keeps it in the folder"
        ) from error

    def observe(line: dict[str, Any]) -> None:
        run.log(named(line), step=line["step"])

    try:
        yield observe
    finally:
        run.finish()


@contextmanager
def tensorboard_logger(folder: RunFolder, *, after: int | None) -> Iterator[Observer]:
    """Metrics as events in the folder, from which TensorBoard draws curves.

    Args:
        folder: of the run.
        after: the step that the run goes on from, None where it begins; what was written of later
            ones is not shown.

    Raises:
        RuntimeError: the extra "tensorboard" is not installed.
    """
    kind = tensorboard_library().SummaryWriter
    writer = kind(str(folder.path / EVENTS), purge_step=0 if after is None else after + 1)

    def observe(line: dict[str, Any]) -> None:
        for name, value in named(line).items():
            writer.add_scalar(name, value, global_step=line["step"])

    try:
        yield observe
    finally:
        writer.close()


def named(line: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a line by name, its step left out."""
    return {name: value for name, value in line.items() if name != "step"}
