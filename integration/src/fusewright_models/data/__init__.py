"""Regression tasks made on the device that trains, and the score of a model on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..choices import DATA_NAMES, DataName
from .ahead import DrawnAhead, DrawnInTurn, drawn_ahead
from .attainable import attainable_log_likelihood
from .calibration import LEVELS, mixture_crps
from .digits import Digits
from .evaluation import Evaluation, Evaluator, HeldOut, Scores, evaluate
from .gaussian_process import GaussianProcess
from .linear_regression import LinearRegression
from .prior import PriorTasks
from .sizes import Size
from .table import Table, TableTasks, read_table
from .task import Sampler, Task


def make_sampler(
    name: DataName | str,
    *,
    held_out: bool = False,
    context_size: Size | None = None,
    target_size: Size | None = None,
    ragged: bool = False,
    padded: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Sampler:
    """The sampler of that name.

    Args:
        name: "digits", "gp-rbf", "gp-matern", "gp-periodic", "blr" or "prior".
        held_out: images that no training task shows; other data differs by its seed alone.
        context_size: M; None takes the default of the data.
        target_size: N; None takes the default of the data.
        ragged: every task of a batch has a context size of its own, in padded tensors.
        padded: batches of all sizes are padded to a few, with lengths that tell of theirs.
        device: where the tasks are made.
        seed: of the sampler's generators.

    Raises:
        ValueError: no data has that name, or the sizes do not fit it.
    """
    makers: dict[str, Callable[..., Sampler]] = {
        "digits": partial(Digits, held_out=held_out),
        "gp-rbf": partial(GaussianProcess, "rbf"),
        "gp-matern": partial(GaussianProcess, "matern"),
        "gp-periodic": partial(GaussianProcess, "periodic"),
        "blr": LinearRegression,
        "prior": PriorTasks,
    }
    if name not in makers:
        raise ValueError(f"data must be one of {DATA_NAMES}; got {name!r}")
    return makers[name](
        context_size=context_size,
        target_size=target_size,
        ragged=ragged,
        padded=padded,
        device=device,
        seed=seed,
    )


__all__ = [
    "DATA_NAMES",
    "LEVELS",
    "DataName",
    "Digits",
    "DrawnAhead",
    "DrawnInTurn",
    "Evaluation",
    "Evaluator",
    "GaussianProcess",
    "HeldOut",
    "LinearRegression",
    "PriorTasks",
    "Sampler",
    "Scores",
    "Size",
    "Table",
    "TableTasks",
    "Task",
    "attainable_log_likelihood",
    "drawn_ahead",
    "evaluate",
    "make_sampler",
    "mixture_crps",
    "read_table",
]
