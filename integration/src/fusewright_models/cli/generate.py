"""What the subcommand does that lets a trained language model continue a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer
from torch import nn

from ..devices import checked_device
from ..text import make_tokenizer
from ..text.generation import continued
from ..training import RunFolder
from .commands import read_run, usage_errors
from .hybrid import HybridRun
from .options import check_bounds
from .text import TextRun
from .titan_mac import TitanMACRun

KINDS: dict[str, type[TextRun]] = {kind.model_name: kind for kind in (TitanMACRun, HybridRun)}


def generate_text(
    run: Path, *, prompt: str, tokens: int, temperature: float, seed: int, device: str | None
) -> None:
    """Print the prompt, and how the model of that run's folder continues it.

    Raises:
        typer.BadParameter: it cannot be served.
    """
    folder = RunFolder(run)
    with usage_errors():
        check_bounds("temperature", temperature)
        trained = read_run(kind_of(folder), folder)
        where = checked_device(trained.device if device is None else device)
        tokenizer = make_tokenizer(trained.tokenizer)
        model = trained.model(tokenizer.vocab_size, device=where)
        load_model(model, folder)
        text = continued(
            trained.reading(model),
            tokenizer,
            tokenizer.prompt(prompt.encode()),
            device=where,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
        )
    typer.echo(prompt + text.decode("utf-8", errors="replace"))


def kind_of(folder: RunFolder) -> type[TextRun]:
    """The kind of run that a folder holds.

    Raises:
        FileNotFoundError: it holds none.
        ValueError: its model does not write.
    """
    name = folder.read_config().get("model")
    if name not in KINDS:
        raise ValueError(f"wanted a run of {' or '.join(KINDS)}; {folder.path} holds {name}'s")
    return KINDS[name]


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
