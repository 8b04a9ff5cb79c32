"""What the commands that train language models do alike: a run from its data to its scores and a
sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from ..text import (
    ByteModel,
    Corpus,
    DocumentWindows,
    PackedWindows,
    TextBatch,
    TextEvaluation,
    Windows,
    cached_corpus,
    data_digest,
    default_cache,
    documents,
    evaluate_text,
    generate,
    hub_commit,
    local_place,
    make_tokenizer,
    read_corpus,
)
from ..text.evaluation import LanguageModel
from ..text.generation import StreamingModel, continued
from ..text.speculation import DraftingModel
from ..training import RunFolder, Trainer
from ..training.evaluations import part_size
from ..training.processes import ALONE, Processes, leaving
from ..training.reporting.report import SAMPLE, write_report
from ..training.source import Source
from .commands import (
    check_device,
    join_others,
    open_run,
    optimizer_of,
    results_in,
    score_table,
    train,
    usage_errors,
)
from .dry_run import Counted, counted, step_operations, tell
from .presets import TextPreset
from .run import Run
from .settings import SAMPLE_TOKENS, TEMPERATURE, TextSettings
from .step_memory import BatchSize
from .weights import begin

PROMPT_TOKENS = 64
# Of a vocabulary that is not read yet: bytes.
BYTES = 256
# Tokens of the window that a dry run counts on a CPU.
MOST_COUNTED = 512
# A data set is read until it has the tokens that the run reads, but at least and at most these:
# fewer would leave too little held out, more would not fit beside the model.
FEWEST_TOKENS, MOST_TOKENS = 2**26, 2**30


class TextRun(TextSettings, Run):
    """A `Run` of a language model.

    Attributes:
        title: of the model, for people.
    """

    title: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.documents_per_window > 1 and not self.documents:
            raise ValueError(
                f"wanted --documents beside --documents-per-window {self.documents_per_window}"
            )
        if self.documents_per_window > 1 and self.seq_len < 2 * self.document_unit:
            raise ValueError(
                f"wanted a --seq-len of {2 * self.document_unit} or more beside "
                f"--documents-per-window {self.documents_per_window}, for two documents, each in "
                f"whole units of {self.document_unit} tokens, to find room; got {self.seq_len}"
            )

    @classmethod
    def completed(cls, preset: TextPreset, chosen: dict[str, Any]) -> dict[str, Any]:
        chosen = {
            "seq_len": preset.seq_len,
            "gradient_accumulation_steps": preset.gradient_accumulation_steps,
        } | chosen
        sizes = ("steps", "gradient_accumulation_steps", "batch_size", "seq_len")
        read = math.prod(chosen[size] for size in sizes)
        tokens = min(max(read, FEWEST_TOKENS), MOST_TOKENS)
        own = cls.own_defaults(preset.architecture, chosen["steps"])
        return {"dataset_tokens": tokens} | own | chosen

    @classmethod
    def own_defaults(cls, shape: Any, steps: int) -> dict[str, Any]:
        """Of the model's own fields, for a preset's architecture and a run of so many steps."""
        raise NotImplementedError

    def built(self, vocab_size: int) -> nn.Module:
        """The model over a vocabulary of that size, on the default device; likewise."""
        raise NotImplementedError

    def batch(self, windows: Tensor) -> TextBatch:
        """Windows ``[B, T + 1]`` as the loss takes them."""
        return TextBatch(windows)

    @property
    def document_unit(self) -> int:
        """Tokens of which each document in a window takes whole ones."""
        return 1

    @property
    def counted_length(self) -> int:
        """Tokens of a window that is counted: of longer ones each has no more operations."""
        raise NotImplementedError

    def scored(self, model: Any) -> LanguageModel:
        """What evaluations ask for a loss."""
        return model

    def reading(self, model: Any) -> StreamingModel:
        """What continues a text."""
        return model

    def drafting(self, model: Any) -> DraftingModel:
        """What continues it by drafts.

        Raises:
            ValueError: the model has none.
        """
        raise ValueError(
            f"wanted a run of hybrid beside --speculate, whose model drafts tokens; got one of "
            f"{self.model_name}"
        )

    def model(self, tokens: int, *, device: torch.device | str | None = None) -> Any:
        """The model of this run, over a tokenizer's vocabulary of that size, on the run's device
        or another.

        Raises:
            ValueError: ``vocab_size`` is smaller, or the sizes do not go together.
        """
        vocab_size = self.checked_vocab_size(tokens)
        torch.manual_seed(self.seed)
        return self.built(vocab_size).to(device or self.device)

    def checked_vocab_size(self, tokens: int) -> int:
        """Of the model, over a tokenizer's of that size; likewise."""
        vocab_size = tokens if self.vocab_size is None else self.vocab_size
        if vocab_size < tokens:
            raise ValueError(
                f"the tokenizer has {tokens} tokens; got --vocab-size {vocab_size}, which is less"
            )
        return vocab_size

    def pinned(self, processes: Processes = ALONE) -> Self:
        """The run with the commit of a data set on the hub, which it goes on with whatever the hub
        has later.

        Raises:
            ValueError, OSError, RuntimeError: there is no such data set.
        """
        place = local_place(self.dataset, self.dataset_subset, self.dataset_revision)
        if place is not None or self.dataset is None:
            return self
        commit = hub_commit(self.dataset, self.dataset_revision)
        return replace(self, dataset_revision=processes.agreed(commit))

    def corpus(self) -> Corpus:
        """Read, or taken from the cache; of the standard library, only where a cache is named."""
        tokenizer = make_tokenizer(self.tokenizer)
        of_data: dict[str, Any] = {
            "subset": self.dataset_subset,
            "column": self.text_column,
            # What is read is what the digest is of.
            "revision": self.pinned().dataset_revision,
        }
        options: dict[str, Any] = {
            "most_tokens": self.dataset_tokens,
            "held_out_bytes": self.presets[self.preset].held_out_bytes,
            "device": self.device,
        }
        if self.dataset is None and self.cache is None:
            return read_corpus(documents(None, **of_data), tokenizer, **options)
        cache = default_cache() if self.cache is None else Path(self.cache)
        return cached_corpus(
            partial(documents, self.dataset, **of_data),
            tokenizer,
            data=data_digest(self.dataset, **of_data, cache=cache),
            cache=cache,
            **options,
        )

    def part_tokens(self, whole: int) -> int:
        """What evaluations before the last one read of so many held-out tokens."""
        sizes = {"trained": self.batch_size * self.seq_len, "whole": whole, "each": self.seq_len}
        return part_size(self.training(), share=self.eval_share, **sizes)

    def windows(self, corpus: Corpus) -> Source[Any]:
        return self.drawn(corpus)

    def drawn(self, corpus: Corpus) -> Windows:
        options: dict[str, Any] = {"digest": corpus.digest, "device": self.device}
        options |= {"length": self.seq_len, "seed": self.seed}
        if self.documents_per_window > 1:
            options |= {"most": self.documents_per_window, "unit": self.document_unit}
            return PackedWindows(corpus.training, corpus.training_ends, **options)
        if self.documents:
            return DocumentWindows(corpus.training, corpus.training_ends, **options)
        return Windows(corpus.training, **options)

    def score(self, model: Any, corpus: Corpus, text_bytes: int, **options: Any) -> TextEvaluation:
        """Of the held-out text, whose predicted tokens stand for so many bytes."""
        return evaluate_text(
            self.scored(model),
            corpus.held_out,
            length=self.seq_len,
            batch_size=self.batch_size,
            text_bytes=text_bytes,
            ends=corpus.held_out_ends if self.documents else None,
            **options,
        )


class HeldOutText:
    """What evaluations of a run score its model on, beside a byte model's score of it.

    Args:
        run: whose sizes of windows and batches these are.
        corpus: whose held-out text it is, or the beginning of it.
        order_2: of the training text.
    """

    def __init__(self, run: TextRun, corpus: Corpus, order_2: ByteModel) -> None:
        self.run, self.corpus = run, corpus
        self.order_2 = order_2.bits_per_byte(corpus.held_out_text)
        self.bytes_per_token = len(corpus.held_out_text) / (len(corpus.held_out) - 1)
        self.scored_bytes = corpus.scored_bytes(by_document=run.documents)

    def score(self, model: Any, **options: Any) -> dict[str, float]:
        """The numbers of an evaluation, by name; options as of `evaluate_text`."""
        result = self.run.score(model, self.corpus, self.scored_bytes, **options)
        return {
            "held_out_bits_per_byte": result.bits_per_byte,
            "order_2_bits_per_byte": self.order_2,
            "held_out_log_likelihood": result.log_likelihood,
            "order_2_log_likelihood": -self.order_2 * math.log(2.0) * self.bytes_per_token,
            "held_out_tokens": len(self.corpus.held_out) - 1,
        }


@leaving()
def train_on_text(
    kind: type[TextRun],
    loss_function: Callable[[Any, Any], Any],
    flags: dict[str, Any],
) -> None:
    """Begin or continue the run that the flags ask for, and report how well it knows text.

    Raises:
        typer.BadParameter: it cannot be served.
        typer.Exit: it was stopped, or ends less than ``margin`` below the order-2 byte model.
    """
    resumed, margin = "resume" in flags, flags.pop("margin", None)
    dry = flags.pop("dry_run", False)
    with usage_errors():
        run, folder = open_run(kind, flags)
    # What is left of the flags is other than in the file.
    with usage_errors(folder.config_file if resumed and not flags else None):
        processes, folder, console = join_others(run, folder)
        check_device(run)
        # Sizes that do not go together are told before the data is read.
        run.shape(run.vocab_size or BYTES)
        if dry:
            _tell(console, run, loss_function)
            return
        run = run.pinned(processes)
        corpus = run.corpus()
        windows = run.windows(corpus)
        order_2 = ByteModel(corpus.training_text)
        vocab_size = run.checked_vocab_size(corpus.tokenizer.vocab_size)
        operations = step_operations(run, lambda: _forward(run, vocab_size, loss_function))
        model = run.model(corpus.tokenizer.vocab_size)
        run = begin(model, run, folder, resumed=resumed, processes=processes)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        processes.shard(model, run.blocks(model))
        training = run.training()
        chosen = optimizer_of(run, model)
    whole = HeldOutText(run, corpus, order_2)
    part = HeldOutText(run, corpus.beginning(run.part_tokens(len(corpus.held_out) - 1)), order_2)

    def scored(text: HeldOutText) -> dict[str, float]:
        return text.score(model, processes=processes, compute=trainer.stepper.scored)

    trainer = Trainer(
        *(model, windows, loss_function, chosen, training, folder),
        console=console,
        evaluate=lambda: scored(whole),
        evaluate_part=lambda: scored(part),
        choices=run.choices,
        processes=processes,
        operations=operations,
    )
    console.print(
        f"{run.title} ({run.label}), {parameters:,} parameters, {len(corpus.training):,} tokens to "
        f"train on, {len(corpus.held_out):,} held out, {run.device}, {run.precision}, into "
        f"{folder.path}",
        highlight=False,
    )
    train(trainer, run, folder, resumed=resumed)
    model.eval()
    try:
        text = _sample(run.reading(model), corpus, run.seed)
    except ValueError as error:
        # A model that has diverged has scores, but writes nothing.
        console.print(f"no text is continued: {error}", highlight=False)
        text = None
    if not processes.is_main:
        return
    if text is not None:
        _show_sample(console, folder, text)
    with usage_errors():
        write_report(folder)
    reached = _report(console, folder)
    results_in(console, folder)
    if margin is not None and not reached >= margin:
        console.print(
            f"wanted {margin} bits per byte or more below the order-2 byte model; got {reached:.4f}"
        )
        raise typer.Exit(1)


def _tell(console: Console, run: TextRun, loss_function: Callable[[Any, Any], Any]) -> None:
    """What the run would take."""
    vocab_size = run.checked_vocab_size(make_tokenizer(run.tokenizer).vocab_size)
    forward = _forward(run, vocab_size, loss_function, with_memory=True)
    tokens = run.batch_size * run.seq_len
    shape = run.shape(vocab_size)
    columns = shape.layers, shape.dim
    size = BatchSize(rows=tokens, unit="token", units=tokens, layer_columns=columns)
    tell(console, run, run.title, forward, size)


def _forward(
    run: TextRun,
    vocab_size: int,
    loss_function: Callable[[Any, Any], Any],
    *,
    with_memory: bool = False,
) -> Counted:
    """A pass over a vocabulary of that size, of windows that are as long as they have to be: one
    for operations alone, a batch where the memory of a step is asked for.
    """
    on_cpu = torch.device(run.device).type == "cpu"
    # What plain torch keeps grows with the window, and its operations do not.
    length = min(run.seq_len, MOST_COUNTED if on_cpu else max(2, run.counted_length))
    rows = run.batch_size if with_memory else 1
    with torch.device("meta"):
        model = run.built(vocab_size)
        batch = run.batch(torch.zeros(rows, length + 1, dtype=torch.int64))
        optimizer = optimizer_of(run, model) if with_memory else None
        loss = lambda: loss_function(model, batch)  # noqa: E731
        return counted(model, loss, rows * length, optimizer=optimizer)


def _sample(model: StreamingModel, corpus: Corpus, seed: int) -> tuple[bytes, bytes]:
    """The beginning of the held-out text, and how the model continues it."""
    prompt = corpus.held_out[:PROMPT_TOKENS].cpu().numpy()
    options: dict[str, Any] = {"tokens": SAMPLE_TOKENS, "temperature": TEMPERATURE, "seed": seed}
    device, tokenizer = corpus.held_out.device, corpus.tokenizer
    (text,), _ = continued(generate, model, tokenizer, [prompt], device=device, **options)
    return tokenizer.decode(prompt), text


def _show_sample(console: Console, folder: RunFolder, sample: tuple[bytes, bytes]) -> None:
    """On the console and in a file."""
    shown, text = sample
    with usage_errors():
        folder.write(SAMPLE, shown + text)
    parts = [(shown, "dim"), (text, "")]
    readable = [(part.decode("utf-8", errors="replace"), style) for part, style in parts]
    console.print(Text("a held-out text, continued:\n", style="bold"), Text.assemble(*readable))


def _report(console: Console, folder: RunFolder) -> float:
    """Show the scores; returns how far the last one is below the order-2 byte model's."""
    lines = [line for line in folder.read_metrics() if "held_out_bits_per_byte" in line]
    scores, reached = [], 0.0
    for name, line in (("before training", lines[0]), ("after training", lines[-1])):
        # Each of the text that it has read.
        bits, order_2 = line["held_out_bits_per_byte"], line["order_2_bits_per_byte"]
        reached = order_2 - bits
        scores.append((name, bits, f"{reached:.4f}"))
    scores.append(("order-2 byte model", order_2, f"{0.0:.4f}"))
    console.print(score_table("held-out bits per byte", ("bits", "below order 2"), scores))
    return reached
