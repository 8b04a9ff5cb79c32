"""The subcommand that lets a trained language model continue a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn

from .commands import read_run, usage_errors
from .devices import checked_device
from .hybrid_run import HybridRun
from .run_fields import LARGEST_SEED
from .text import Tokenizer, generate, make_tokenizer
from .text.generation import StreamingModel
from .text_run import TextRun
from .titan_mac_run import TitanMACRun
from .training import RunFolder

KINDS: dict[str, type[TextRun]] = {kind.model_name: kind for kind in (TitanMACRun, HybridRun)}
SAMPLE_TOKENS, TEMPERATURE = 256, 0.8


def generate_text(
    run: Annotated[Path, typer.Argument(help="Results folder of a titan-mac or hybrid run.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="How many follow.")] = SAMPLE_TOKENS,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most likely token.")
    ] = TEMPERATURE,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of all draws.")] = 0,
    device: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None,
) -> None:
    """Continue a text with a trained language model, token by token: its state stands for what it
    has read.
    """
    folder = RunFolder(run)
    with usage_errors():
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
    state = folder.load_checkpoint()
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"wanted this model's checkpoint in {folder.checkpoint_file}; got: {error}"
        ) from error
    model.eval()


def continued(
    model: StreamingModel,
    tokenizer: Tokenizer,
    prompt: np.ndarray,
    *,
    device: torch.device,
    tokens: int,
    temperature: float,
    seed: int,
) -> bytes:
    """The text that a model puts after the tokens ``prompt [P]``, without the prompt's own."""
    given = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(device)
    drawn = generate(
        model,
        given,
        tokens=tokens,
        temperature=temperature,
        vocab_size=tokenizer.vocab_size,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return tokenizer.decode(drawn[0].cpu().numpy())
