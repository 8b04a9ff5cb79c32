"""What the subcommand does that writes a trained model where others can read it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import typer

from ..text import make_tokenizer
from ..training import RunFolder
from .commands import read_run, usage_errors
from .generate import KINDS
from .transformer_np import TransformerNPRun
from .weights import load_model

TOKENIZER, SETTINGS = "tokenizer.json", "run.json"


def export_run(run: Path, out: Path, *, push: str | None) -> None:
    """Write the model of that run's last checkpoint, and what it was trained with, to a folder.

    Raises:
        typer.BadParameter: it cannot be served.
    """
    folder = RunFolder(run)
    with usage_errors():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"wanted an empty folder in --out; got {out}")
        tokenizer: Path | None = None
        name = folder.read_config().get("model")
        if name == TransformerNPRun.model_name:
            of_tasks = read_run(TransformerNPRun, folder)
            model: Any = of_tasks.model(of_tasks.sampler(held_out=True).x_width)
        elif name in KINDS:
            of_text = read_run(KINDS[name], folder)
            vocab_size = make_tokenizer(of_text.tokenizer).vocab_size
            model = of_text.model(vocab_size, device=torch.device("cpu"))
            if of_text.tokenizer is not None and Path(of_text.tokenizer).is_file():
                tokenizer = Path(of_text.tokenizer)
        else:
            raise ValueError(f"wanted a run of a model; {folder.path} holds {name}'s")
        load_model(model, folder)
        model.save_pretrained(out)
        shutil.copyfile(folder.config_file, out / SETTINGS)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, out / TOKENIZER)
    typer.echo(f"{type(model).__name__} in {out}")
    if push is not None:
        with usage_errors():
            typer.echo(pushed(out, push))


def pushed(folder: Path, repository: str) -> str:
    """Upload what was exported; returns where it is.

    Raises:
        OSError, ValueError: the hub refuses it, for lack of a token for instance.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    name = hub.create_repo(repository, exist_ok=True).repo_id
    return str(hub.upload_folder(repo_id=name, folder_path=folder))
