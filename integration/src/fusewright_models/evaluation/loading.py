"""Language models with their tokenizers, from what runs and exports leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..cli.commands import read_run
from ..cli.export import SETTINGS, TOKENIZER
from ..cli.generate import KINDS
from ..cli.hybrid import HybridRun
from ..cli.settings_file import read_settings
from ..cli.text import BYTES, TextRun
from ..cli.titan_mac import TitanMACRun
from ..cli.weights import load_model
from ..devices import checked_device
from ..models.hybrid import HybridLM
from ..models.published import CONFIG, DTYPES, file_of, optional_file_of, read_model
from ..models.titan_mac import TitanMAC
from ..text import Tokenizer, make_tokenizer
from ..training import RunFolder
from .scoring import Scorer

Model = TitanMAC | HybridLM
# By the name in a published config.json: the model, and the runs that train it.
MODELS: dict[str, tuple[type[TitanMAC] | type[HybridLM], type[TextRun]]] = {
    "TitanMAC": (TitanMAC, TitanMACRun),
    "HybridLM": (HybridLM, HybridRun),
}
# What a window reads of a model that does not say what it was trained on: lm-eval's own default.
LENGTH = 2048
OF_RUNS = {"fp32": "float32", "bf16": "bfloat16"}


def load_scorer(
    pretrained: str | Path,
    *,
    tokenizer: str | None = None,
    max_length: int | None = None,
    batch_size: int = 1,
    device: str = "cpu",
    dtype: str = "auto",
    backend: Any = "auto",
    revision: str | None = None,
) -> Scorer:
    """A language model, ready to score texts.

    Args:
        pretrained: folder of a run, of an export or of ``save_pretrained``, or a repository of the
            Hugging Face hub.
        tokenizer: a tokenizers file or name; None is the one that it was trained with. Where the
            folder says nothing of that, a model of 256 tokens reads bytes.
        max_length: tokens that a window reads; None is as many as it was trained on, or 2048.
        batch_size: windows, or prompts, that go through the model together.
        device: cpu, cuda or cuda:N.
        dtype: what it computes in: "float64" or "float32", or "bfloat16" or "float16" by autocast;
            "auto" is what it was trained in.
        backend: of the model's kernels.
        revision: branch, tag or commit of the repository.

    Raises:
        OSError: there is no such model.
        ValueError: it is no language model, or what is asked for does not go with it.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}; got {dtype!r}")
    where = checked_device(device)
    name = str(pretrained)
    folder = RunFolder(name)
    if folder.holds_a_run and folder.read_config().get("model") in KINDS:
        model, found, trained = _of_run(folder, tokenizer, where, backend)
    else:
        model, found, trained = _published(
            name, tokenizer, device=where, backend=backend, revision=revision
        )
    if dtype == "auto":
        dtype = OF_RUNS.get(trained.get("precision", ""), "auto")
    narrow = dtype in ("bfloat16", "float16")
    if not narrow and dtype != "auto":
        model.to(DTYPES[dtype])
    return Scorer(
        model=model,
        tokenizer=found,
        length=trained.get("seq_len", LENGTH) if max_length is None else max_length,
        batch_size=batch_size,
        autocast=DTYPES[dtype] if narrow else None,
    )


def _of_run(
    folder: RunFolder, tokenizer: str | None, device: torch.device, backend: Any
) -> tuple[Model, Tokenizer, dict[str, Any]]:
    """The model of a run's last checkpoint, its tokenizer or another, and its settings."""
    kind = KINDS[folder.read_config()["model"]]
    run = replace(read_run(kind, folder), backend=backend)
    found = make_tokenizer(run.tokenizer if tokenizer is None else tokenizer)
    model = run.model(found.vocab_size, device=device)
    load_model(model, folder)
    return model, found, {"seq_len": run.seq_len, "precision": run.precision}


def _published(
    name: str, tokenizer: str | None, *, device: torch.device, backend: Any, revision: str | None
) -> tuple[Model, Tokenizer, dict[str, Any]]:
    """Likewise of a folder or a repository; settings are those that lie beside the weights."""
    written = read_model(file_of(name, CONFIG, revision=revision))
    if written not in MODELS:
        raise ValueError(f"wanted a {' or '.join(MODELS)}; {name} is a {written}")
    kind, of_runs = MODELS[written]
    options: dict[str, Any] = {"device": device, "backend": backend, "revision": revision}
    model = kind.from_pretrained(name, **options)
    # Its other files are of the same commit.
    revision = model.revision or revision
    file = optional_file_of(name, SETTINGS, revision=revision)
    settings = {} if file is None else read_settings(of_runs, file)
    if tokenizer is None:
        # The file that was copied there; where there is none, a name on the hub, or bytes.
        own = optional_file_of(name, TOKENIZER, revision=revision)
        tokenizer = settings.get("tokenizer") if own is None else str(own)
    if tokenizer is None and file is None and model.config.vocab_size != BYTES:
        raise ValueError(
            f"wanted a tokenizer of {model.config.vocab_size} tokens: {name} has no {TOKENIZER}, "
            f"and no {SETTINGS} that names one"
        )
    return model, make_tokenizer(tokenizer), settings
