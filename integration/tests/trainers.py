"""Trainers of the smallest models, which print nothing, and how two of them are compared."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import torch
from fusewright_models import (
    TITAN_MAC,
    TitanMAC,
    TitanMACConfig,
    TransformerNP,
    TransformerNPConfig,
)
from fusewright_models.cli.presets import TRANSFORMER_NP
from fusewright_models.cli.titan_mac import next_token_loss
from fusewright_models.cli.transformer_np import negative_log_likelihood
from fusewright_models.data import Evaluator, make_sampler
from fusewright_models.text import Windows, evaluate_text
from fusewright_models.training import RunFolder, Trainer
from rich.console import Console
from torch.utils import _pytree as pytree

from .commands import assert_same_metrics

SMALL = TransformerNPConfig(
    x_width=3, width=16, layers=3, heads=2, feed_forward_width=21, components=4
)
SMALL_TITAN_MAC = TitanMACConfig(
    vocab_size=11,
    dim=16,
    layers=2,
    heads=2,
    segment=8,
    persistent=2,
    memory_chunk=4,
    memory_heads=2,
    memory_hidden=8,
)
MODELS = ("titan-mac", "transformer-np")


def tiny(
    name: str,
    *,
    device: str = "cpu",
    ragged: bool = False,
    padded: bool = False,
    data: str = "digits",
    length: int = 64,
):
    """The tiny preset of a model from one seed, its batches, of TransformerNP those of ``data``,
    and its loss.
    """
    torch.manual_seed(0)
    if name == "titan-mac":
        text = torch.randint(97, 105, (4096,), generator=torch.Generator().manual_seed(0))
        model = TitanMAC(TITAN_MAC["tiny"]).to(device)
        return model, Windows(text.to(device), length=length), next_token_loss
    source = make_sampler(data, ragged=ragged, padded=padded, device=device)
    shape = TRANSFORMER_NP["tiny"].architecture
    model = TransformerNP(TransformerNPConfig(x_width=source.x_width, **shape)).to(device)
    return model, source, negative_log_likelihood


def score_of(name: str, model, compute, *, device: str = "cpu") -> dict[str, float]:
    """Of either model on what is held out, in batches of several shapes."""
    if name == "titan-mac":
        text = torch.randint(97, 105, (190,), generator=torch.Generator().manual_seed(1))
        sizes = {"length": 20, "batch_size": 2, "text_bytes": 189}
        found = evaluate_text(model, text.to(device), **sizes, compute=compute)
    else:
        sampler = make_sampler("digits", held_out=True, device=device)
        found = Evaluator(sampler, batch_size=2).score(model, 3, compute=compute)
    return {"held_out_log_likelihood": found.log_likelihood}


def quiet_trainer(path: Path, model, source, loss, optimizer, config, **options) -> Trainer:
    """Into a folder; what it would print is in its console's file."""
    console = Console(file=StringIO(), width=400)
    folder = RunFolder(path)
    return Trainer(model, source, loss, optimizer, config, folder, console=console, **options)


def training_lines(trainer: Trainer) -> list[dict]:
    return [line for line in trainer.folder.read_metrics() if "loss" in line]


def assert_same_bits(one: Trainer, other: Trainer) -> None:
    """All that both have written, but times, and their parameters."""
    assert_same_metrics(one.folder.path, other.folder.path)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def assert_same_state(one: Trainer, other: Trainer) -> None:
    """Of their optimizers."""
    ours, theirs = (
        [x for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
        for state in (one.optimizer.state_dict(), other.optimizer.state_dict())
    )
    # What has not been counted yet is NaN.
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)
