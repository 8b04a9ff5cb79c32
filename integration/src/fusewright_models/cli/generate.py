"""What the subcommand does that lets a trained language model continue texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ..devices import checked_device
from ..text import Generated, generate, make_tokenizer, speculate
from ..text.generation import continued
from ..training import RunFolder
from .commands import plain_console, read_run, usage_errors
from .hybrid import HybridRun
from .options import check_bounds
from .text import TextRun
from .titan_mac import TitanMACRun
from .weights import load_model

KINDS: dict[str, type[TextRun]] = {kind.model_name: kind for kind in (TitanMACRun, HybridRun)}
# What is continued where nothing is said.
PROMPT = "def "


def generate_text(
    run: Path,
    *,
    prompt: list[str],
    prompts: Path | None,
    drafts: bool,
    device: str | None,
    seed: int,
    **options: Any,
) -> None:
    """Print each prompt, and how the model of that run's folder continues it.

    Raises:
        typer.BadParameter: it cannot be served.
    """
    folder = RunFolder(run)
    with usage_errors():
        for name in ("temperature", "top_p"):
            check_bounds(name, options[name])
        trained = read_run(kind_of(folder), folder)
        where = checked_device(trained.device if device is None else device)
        given = prompt + ([] if prompts is None else lines_of(prompts)) or [PROMPT]
        tokenizer = make_tokenizer(trained.tokenizer)
        model = trained.model(tokenizer.vocab_size, device=where)
        reading = trained.drafting(model) if drafts else trained.reading(model)
        load_model(model, folder)
        texts, found = continued(
            speculate if drafts else generate,
            reading,
            tokenizer,
            [tokenizer.prompt(each.encode()) for each in given],
            device=where,
            seed=seed,
            **options,
        )
    for each, text in zip(given, texts, strict=True):
        typer.echo(each + text.decode("utf-8", errors="replace"))
    plain_console(stderr=True).print(told(found), highlight=False, soft_wrap=True)


def lines_of(file: Path) -> list[str]:
    """The prompts of a text file, one on each line that has anything.

    Raises:
        OSError: there is none.
        ValueError: it is no text, or has no prompt.
    """
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError as error:
        raise ValueError(f"wanted text in UTF-8 in {file}; got: {error}") from error
    if not found:
        raise ValueError(f"wanted a prompt on a line of {file}; got none")
    return found


def told(found: Generated) -> str:
    """Speeds, and how drafts fared."""
    parts = [
        f"read {found.read:,} tokens at {found.reading_rate:,.0f} tokens/s",
        f"wrote {found.drawn:,} at {found.drawing_rate:,.0f} tokens/s",
    ]
    if found.drafted:
        parts.append(f"accepted {found.acceptance:.1%} of {found.drafted:,} drafts")
    return ", ".join(parts)


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
