"""Weights of runs, for models that go on from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import typer
from torch import nn

from ..models.published import CONFIG, check_shape, commit_of, file_of
from ..training import Processes, RunFolder
from .commands import read_run
from .run import RunT


def load_model(model: nn.Module, folder: RunFolder) -> None:
    """Give the model a run's weights, and put it into evaluation mode.

    Raises:
        FileNotFoundError, ValueError: the folder holds no checkpoint, or that of another model.
    """
    state, file = folder.checkpoints.load(partial(typer.echo, err=True))
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"wanted this model's checkpoint in {file}; got: {error}") from error
    model.eval()


def begin(model: Any, run: RunT, folder: RunFolder, *, resumed: bool, processes: Processes) -> RunT:
    """Give a model the weights that its run is to begin with, if those are any but its own: where
    it has a checkpoint, it has begun. Returns the run, with the commit of these if they have one.

    Raises:
        OSError, ValueError: they cannot be had, or are another model's.
    """
    if run.init_from is None or (resumed and folder.holds_a_checkpoint):
        return run
    other, shape = RunFolder(run.init_from), model.config
    if other.path.is_dir() and run.init_revision is not None:
        raise ValueError(f"{other.path} is a folder, without --init-revision {run.init_revision}")
    if not other.holds_a_checkpoint:
        file = file_of(run.init_from, CONFIG, revision=run.init_revision)
        revision = processes.agreed(commit_of(run.init_from, file) or run.init_revision)
        model.load_pretrained(run.init_from, revision=revision)
        return replace(run, init_revision=revision)
    theirs = read_run(type(run), other).shape(getattr(shape, "vocab_size", None) or shape.x_width)
    check_shape(shape, theirs, other.config_file)
    load_model(model, other)
    model.train()
    return run
