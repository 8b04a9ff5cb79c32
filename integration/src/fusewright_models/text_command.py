"""What the commands that train language models do alike: their flags, and a run from its data to
its scores and a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .commands import check_device, open_run, optimizer_of, results_in, train, usage_errors
from .generate_command import SAMPLE_TOKENS, TEMPERATURE, continued
from .run_fields import LARGEST_SEED
from .text import ByteModel, Corpus, evaluate_text
from .text.generation import StreamingModel
from .text_run import TextRun
from .training import RunFolder, Trainer, wandb_observer

SAMPLE = "sample.txt"
PROMPT_TOKENS = 64

VocabSize = Annotated[int | None, typer.Option(min=1, help="Default: the tokenizer's.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a window.")]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="A Hugging Face name, a parquet, JSON-lines or text file, or a folder of such. "
        "Default: the sources of Python's standard library."
    ),
]
DatasetSubset = Annotated[
    str | None, typer.Option(help="Configuration of a Hugging Face data set.")
]
TextColumn = Annotated[str | None, typer.Option(help="Column that holds the text. Default: text.")]
DatasetTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens to read for training. Default: what the run reads."),
]
TokenizerChoice = Annotated[
    str | None, typer.Option("--tokenizer", help="A tokenizers file or name. Default: bytes.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Windows per batch.")]
AccumulationSteps = Annotated[int | None, typer.Option(min=1, help="Batches per optimizer step.")]
WeightDecay = Annotated[
    float | None, typer.Option(min=0.0, help="Of matrices. Default: 0.1; 0 of learned.")
]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")]
Seed = Annotated[
    int | None, typer.Option(min=0, max=LARGEST_SEED, help="Of weights and windows. Default: 0.")
]
WandB = Annotated[
    bool | None, typer.Option("--wandb", help="Show the metrics to Weights & Biases, too.")
]
WandBProject = Annotated[str | None, typer.Option(help="Of the run there. Default: fusewright.")]
Out = Annotated[
    Path | None, typer.Option(help="Results folder. Default: runs/, model, its kind and time.")
]
Resume = Annotated[
    Path | None, typer.Option(help="Continue the run of this folder; takes no other choice.")
]
Margin = Annotated[
    float | None,
    typer.Option(help="Fail unless the result is so many bits per byte below order 2."),
]


def chosen_flags(given: dict[str, Any]) -> dict[str, Any]:
    """Those of a command line that make a run, of a command's ``locals()``."""
    return {name: x for name, x in given.items() if x is not None and name != "margin"}


def train_on_text(
    kind: type[TextRun],
    loss_function: Callable[[Any, Any], Any],
    flags: dict[str, Any],
    margin: float | None,
) -> None:
    """Begin or continue the run that the flags ask for, and report how well it knows text.

    Raises:
        typer.BadParameter: it cannot be served.
        typer.Exit: it was stopped, or ends less than ``margin`` below the order-2 byte model.
    """
    console = Console()
    resumed = "resume" in flags
    with usage_errors():
        run, folder = open_run(kind, flags)
    with usage_errors(folder.config_file if resumed else None):
        check_device(run)
        corpus = run.corpus()
        windows = run.windows(corpus)
        order_2 = ByteModel(corpus.training_text).bits_per_byte(corpus.held_out_text)
        model = run.model(corpus.tokenizer.vocab_size)
        training = run.training()
        chosen = optimizer_of(run, model)
    text_bytes = len(corpus.held_out_text)
    bytes_per_token = text_bytes / (len(corpus.held_out) - 1)

    def evaluation() -> dict[str, float]:
        result = evaluate_text(
            run.scored(model),
            corpus.held_out,
            length=run.seq_len,
            batch_size=run.batch_size,
            text_bytes=text_bytes,
        )
        return {
            "held_out_bits_per_byte": result.bits_per_byte,
            "order_2_bits_per_byte": order_2,
            "held_out_log_likelihood": result.log_likelihood,
            "order_2_log_likelihood": -order_2 * math.log(2.0) * bytes_per_token,
        }

    with usage_errors():
        observe = None
        if run.wandb:
            observe = wandb_observer(folder, project=run.wandb_project, config=asdict(run))
    trainer = Trainer(
        model,
        windows,
        loss_function,
        chosen,
        training,
        folder,
        evaluate=evaluation,
        console=console,
        observe=observe,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{run.title} ({run.label}), {parameters:,} parameters, {len(corpus.training):,} tokens to "
        f"train on, {len(corpus.held_out):,} held out, {run.device}, {run.mixed_precision}, into "
        f"{folder.path}",
        highlight=False,
    )
    train(trainer, run, folder, resumed=resumed)
    model.eval()
    _show_sample(console, folder, run.reading(model), corpus, run.seed)
    reached = _report(console, folder)
    results_in(console, folder)
    if margin is not None and not reached >= margin:
        console.print(
            f"wanted {margin} bits per byte or more below the order-2 byte model; got {reached:.4f}"
        )
        raise typer.Exit(1)


def _show_sample(
    console: Console, folder: RunFolder, model: StreamingModel, corpus: Corpus, seed: int
) -> None:
    """The beginning of the held-out text, continued, on the console and in a file."""
    prompt = corpus.held_out[:PROMPT_TOKENS].cpu().numpy()
    shown = corpus.tokenizer.decode(prompt)
    text = continued(
        model,
        corpus.tokenizer,
        prompt,
        device=corpus.held_out.device,
        tokens=SAMPLE_TOKENS,
        temperature=TEMPERATURE,
        seed=seed,
    )
    (folder.path / SAMPLE).write_bytes(shown + text)
    parts = [(shown, "dim"), (text, "")]
    readable = [(part.decode("utf-8", errors="replace"), style) for part, style in parts]
    console.print(Text("a held-out text, continued:\n", style="bold"), Text.assemble(*readable))


def _report(console: Console, folder: RunFolder) -> float:
    """Show the scores; returns how far the last one is below the order-2 byte model's."""
    lines = [line for line in folder.read_metrics() if "held_out_bits_per_byte" in line]
    order_2 = lines[-1]["order_2_bits_per_byte"]
    reached = order_2 - lines[-1]["held_out_bits_per_byte"]
    table = Table(title="held-out bits per byte")
    table.add_column("")
    table.add_column("bits", justify="right")
    table.add_column("below order 2", justify="right")
    for name, bits in (
        ("before training", lines[0]["held_out_bits_per_byte"]),
        ("after training", lines[-1]["held_out_bits_per_byte"]),
        ("order-2 byte model", order_2),
    ):
        table.add_row(name, f"{bits:.4f}", f"{order_2 - bits:.4f}")
    console.print(table)
    return reached
