"""What a checkpoint has to be for a run to go on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..choices import FORMER
from .checkpoints import Checkpoints
from .processes import Processes
from .reporting.record import Record
from .run_folder import RunFolder

# What every checkpoint holds.
STATE = {
    "step",
    "model",
    "optimizer",
    "optimizer_kind",
    "network",
    "skipped_in_a_row",
    "source",
    "torch_rng",
}


def read_state(
    checkpoints: Checkpoints, record: Record, processes: Processes
) -> tuple[dict[str, Any], Path]:
    """What all processes read, once all have, and the file; where one reads none or another, all
    raise.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: none can be read as one, or it lacks what every one holds.
    """
    error: Exception | None = None
    try:
        state, file = checkpoints.load(record.say)
        read = checkpoints.identity(file)
    except (ValueError, OSError, RuntimeError, MemoryError) as failed:
        error, read = failed, f"none: {failed}"
    found = processes.told(read)
    if error is not None:
        raise error
    if len({*found}) > 1:
        got = "; ".join(f"{each} in process {rank}" for rank, each in enumerate(found))
        raise ValueError(
            f"wanted all processes to read one checkpoint of {checkpoints.run}; got {got}"
        )
    if not state.keys() >= STATE:
        raise ValueError(
            f"wanted a checkpoint with {', '.join(sorted(STATE))} in {file}; "
            f"got {', '.join(map(str, state)) or 'nothing'}"
        )
    return state, file


def check_optimizer(state: dict[str, Any], file: Path, *, kind: str, network: str | None) -> None:
    """
    Raises:
        ValueError: the checkpoint is of another optimizer, or of another network of it.
    """
    if state["optimizer_kind"] != kind:
        raise ValueError(
            f"wanted the state of a {kind} in {file}; got that of a {state['optimizer_kind']}"
        )
    if state["network"] != network:
        raise ValueError(
            f"wanted a run with the network of digest {network} in {file}; "
            f"got one with that of {state['network']}"
        )


def trained_steps(
    trained: dict[str, Any] | None, choices: dict[str, Any] | None, steps: int
) -> int:
    """The number of steps that the checkpoint's run was to have.

    Args:
        trained: its choices.
        choices: of this run.
        steps: of this run.

    Raises:
        ValueError: it was trained with other choices.
    """
    if trained is None or choices is None:
        return steps
    trained = {FORMER.get(name, name): value for name, value in trained.items()}
    absent = object()
    names = [
        name
        # A resumed run may have another number of them.
        for name in sorted((trained.keys() | choices.keys()) - {"steps"})
        if trained.get(name, absent) != choices.get(name, absent)
    ]
    if names:
        wanted, got = (
            ", ".join(f"{name} {each.get(name, 'absent')!r}" for name in names)
            for each in (trained, choices)
        )
        raise ValueError(f"wanted the choices that the run was trained with: {wanted}; got {got}")
    return trained.get("steps", steps)


def check_metrics(folder: RunFolder, noted: int | None) -> None:
    """
    Raises:
        ValueError: lines are missing that were there when the checkpoint was saved, up to step
            ``noted``.
    """
    found = [line["step"] for line in folder.read_metrics()]
    if noted is not None and not (found and max(found) >= noted):
        got = f"those up to step {max(found)}" if found else "none"
        raise ValueError(
            f"wanted the metrics up to step {noted}, which the checkpoint was saved after, in "
            f"{folder.metrics_file}; got {got}"
        )
