"""What the subcommand does that writes a trained model where others can read it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import typer
from safetensors import SafetensorError

from ..data.columns import COLUMNS
from ..models.published import DTYPES
from ..text import make_tokenizer
from ..training import RunFolder
from .commands import read_run, usage_errors
from .generate import KINDS
from .transformer_np import TransformerNPRun
from .weights import load_model

TOKENIZER, SETTINGS = "tokenizer.json", "run.json"


def export_run(run: Path, out: Path, *, push: str | None, dtype: str = "float32") -> None:
    """Write the model of that run's last checkpoint, its numbers rounded to ``dtype``, and what it
    was trained with, to a folder.

    Raises:
        typer.BadParameter: it cannot be served.
    """
    folder = RunFolder(run)
    with usage_errors():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"wanted an empty folder in --out; got {out}")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        tokenizer: Path | None = None
        name = folder.read_config().get("model")
        if name == TransformerNPRun.model_name:
            # Wherever it was trained.
            of_tasks = replace(read_run(TransformerNPRun, folder), device="cpu")
            model: Any = of_tasks.model(of_tasks.x_width)
        elif name in KINDS:
            of_text = read_run(KINDS[name], folder)
            vocab_size = make_tokenizer(of_text.tokenizer).vocab_size
            model = of_text.model(vocab_size, device=torch.device("cpu"))
            if of_text.tokenizer is not None and Path(of_text.tokenizer).is_file():
                tokenizer = Path(of_text.tokenizer)
        else:
            raise ValueError(f"wanted a run of a model; {folder.path} holds {name}'s")
        load_model(model, folder)
        model.to(DTYPES[dtype])
        with whole(out) as unfinished:
            model.save_pretrained(unfinished)
            shutil.copyfile(folder.config_file, unfinished / SETTINGS)
            if (columns := folder.path / COLUMNS).exists():
                shutil.copyfile(columns, unfinished / COLUMNS)
            if tokenizer is not None:
                shutil.copyfile(tokenizer, unfinished / TOKENIZER)
    typer.echo(f"{type(model).__name__} in {out}")
    if push is not None:
        with usage_errors():
            typer.echo(pushed(out, push))


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets the name of another, empty or not there, at the end;
    nothing of it stays where that fails.

    Raises:
        OSError: it cannot be written.
    """
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.absolute().parent, ignore_cleanup_errors=True) as folder:
        # With the rights of any other new folder.
        unfinished = Path(folder, out.name)
        unfinished.mkdir()
        try:
            yield unfinished
        except SafetensorError as error:
            raise OSError(f"could not write {out}: {error}") from error
        if out.exists():
            out.rmdir()
        unfinished.rename(out)


def pushed(folder: Path, repository: str) -> str:
    """Upload what was exported; returns where it is.

    Raises:
        RuntimeError: the hub refuses it, for lack of a token for instance, or is not reached.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        name = hub.create_repo(repository, exist_ok=True).repo_id
        return str(hub.upload_folder(repo_id=name, folder_path=folder))
    except Exception as error:
        # Of what goes wrong on the way its libraries have kinds of their own.
        raise RuntimeError(f"could not upload {folder} to {repository}: {error}") from error
