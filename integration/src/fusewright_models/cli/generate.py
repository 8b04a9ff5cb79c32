"""What the subcommand does that lets a trained language model continue a text."""

from __future__ import annotations

from pathlib import Path

import typer

from ..devices import checked_device
from ..text import make_tokenizer
from ..text.generation import continued
from ..training import RunFolder
from .commands import read_run, usage_errors
from .hybrid import HybridRun
from .options import check_bounds
from .text import TextRun
from .titan_mac import TitanMACRun
from .weights import load_model

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
