"""Weights of runs, for models that go on from them."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from torch import nn

from ..models.published import check_shape
from ..training import RunFolder
from .commands import Run, read_run


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


def begin(model: Any, run: Run, folder: RunFolder, *, resumed: bool) -> None:
    """Give a model the weights that its run is to begin with, if those are any but its own: where
    it has a checkpoint, it has begun.

    Raises:
        OSError, ValueError: they cannot be had, or are another model's.
    """
    if run.init_from is None or (resumed and folder.holds_a_checkpoint):
        return
    other = RunFolder(run.init_from)
    if not other.holds_a_checkpoint:
        model.load_pretrained(run.init_from)
        return
    shape = model.config
    theirs = read_run(type(run), other).shape(getattr(shape, "vocab_size", None) or shape.x_width)
    check_shape(shape, theirs, other.config_file)
    load_model(model, other)
    model.train()
