"""What the subcommand does that scores a trained language model on held-out text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import distributed

from ..text import ByteModel
from ..training import RunFolder
from ..training.processes import check_device_of_all, join, leaving
from ..training.shortage import asked_for
from .commands import (
    check_device,
    host_usage_errors,
    plain_console,
    read_run,
    score_table,
    shared_usage_errors,
    usage_errors,
)
from .generate import kind_of
from .weights import load_model

# How the run was trained, in the place of which evaluations have ways of their own.
OF_TRAINING: dict[str, Any] = {"parallel": None, "capture": None}
OF_TRAINING |= {"wandb": False, "tensorboard": False, "memory_snapshot": False}


@leaving()
def evaluate_run(run: Path, flags: dict[str, Any]) -> None:
    """Print how well the model of that run's folder knows its held-out text, in windows whose
    tokens the processes of torchrun share.

    Args:
        run: the folder.
        flags: settings of the run that are other here.

    Raises:
        typer.BadParameter: it cannot be served.
        typer.Exit: memory ran out.
    """
    folder = RunFolder(run)
    with host_usage_errors():
        trained = replace(read_run(kind_of(folder), folder), **OF_TRAINING | flags)
        check_device_of_all(trained.device)
    with usage_errors():
        processes = join(None, trained.device)
    with shared_usage_errors(processes):
        check_device(trained)
        corpus = trained.corpus()
        model = trained.model(corpus.tokenizer.vocab_size)
        load_model(model, folder)
    device = torch.device(trained.device).type
    bf16 = trained.precision == "bf16"
    try:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            found = trained.score(
                model,
                corpus,
                corpus.scored_bytes(by_document=trained.documents),
                group=distributed.group.WORLD if processes.several else None,
            )
    except (RuntimeError, MemoryError) as error:
        asked = asked_for(error)
        if asked is None:
            raise
        windows = f"{trained.batch_size} windows of {trained.seq_len:,} tokens at a time"
        plain_console(stderr=True).print(
            f"out of memory with {windows}: {asked}; a smaller --batch-size needs less, and more "
            "processes of torchrun, which share the tokens of a window, have more",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    if not processes.is_main:
        return
    order_2 = ByteModel(corpus.training_text).bits_per_byte(corpus.held_out_text)
    told = {
        f"{trained.title}, windows of {trained.seq_len:,} tokens": found.bits_per_byte,
        "order-2 byte model": order_2,
    }
    scores = [(name, bits, f"{order_2 - bits:.4f}") for name, bits in told.items()]
    columns = "bits", "below order 2"
    plain_console().print(score_table("held-out bits per byte", columns, scores))
