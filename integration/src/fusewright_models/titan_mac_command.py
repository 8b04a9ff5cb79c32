"""The subcommand that trains a TitanMAC on text."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .commands import (
    BackendChoice,
    CaptureChoice,
    Compile,
    Device,
    EvaluateEvery,
    LogEvery,
    OptimizerChoice,
    OptimizerWeights,
    PeakRate,
    PrecisionChoice,
    check_device,
    open_run,
    optimizer_of,
    results_in,
    train,
    usage_errors,
)
from .generate_command import SAMPLE_TOKENS, TEMPERATURE, continued
from .presets import TitanMACPresetName
from .run_fields import LARGEST_SEED
from .text import ByteModel, Corpus, TextBatch, evaluate_text
from .titan_mac import TitanMAC
from .titan_mac_config import Variant
from .titan_mac_run import TitanMACRun
from .training import RunFolder, Trainer, wandb_observer

SAMPLE = "sample.txt"
PROMPT_TOKENS = 64


def next_token_loss(model: TitanMAC, batch: TextBatch) -> Tensor:
    """Minus the mean of log p(token | those before it in its window), nats."""
    return model.loss(batch.windows)


def titan_mac(
    preset: Annotated[
        TitanMACPresetName | None, typer.Option(help="Sizes of model and training. Default: demo.")
    ] = None,
    variant: Annotated[
        Variant | None, typer.Option(help="How the memory goes with attention. Default: mac.")
    ] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Model width.")] = None,
    num_layers: Annotated[int | None, typer.Option(min=1)] = None,
    num_heads: Annotated[int | None, typer.Option(min=1)] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Segment of mac, window of mag and mal, in tokens.")
    ] = None,
    memory_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens whose memory gradients share their weights.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Default: the tokenizer's.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a window.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face name, a parquet, JSON-lines or text file, or a folder of such. "
            "Default: the sources of Python's standard library."
        ),
    ] = None,
    dataset_subset: Annotated[
        str | None, typer.Option(help="Configuration of a Hugging Face data set.")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column that holds the text. Default: text.")
    ] = None,
    dataset_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to read for training. Default: what the run reads."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizers file or name. Default: bytes.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows per batch.")] = None,
    gradient_accumulation_steps: Annotated[
        int | None, typer.Option(min=1, help="Batches per optimizer step.")
    ] = None,
    optimizer: OptimizerChoice = None,
    optimizer_weights: OptimizerWeights = None,
    lr: PeakRate = None,
    weight_decay: Annotated[
        float | None, typer.Option(min=0.0, help="Of matrices. Default: 0.1; 0 of learned.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    mixed_precision: PrecisionChoice = None,
    device: Device = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=LARGEST_SEED, help="Of weights and windows. Default: 0."),
    ] = None,
    compile: Compile = None,
    capture: CaptureChoice = None,
    backend: BackendChoice = None,
    log_every: LogEvery = None,
    eval_every: EvaluateEvery = None,
    wandb: Annotated[
        bool | None, typer.Option("--wandb", help="Show the metrics to Weights & Biases, too.")
    ] = None,
    wandb_project: Annotated[
        str | None, typer.Option(help="Of the run there. Default: fusewright.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder. Default: runs/, model, variant and time.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run of this folder; takes no other choice.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Fail unless the result is so many bits per byte below order 2."),
    ] = None,
) -> None:
    """Train a TitanMAC: a language model with a neural memory that learns while it reads.

    Without flags: bytes of the running Python's standard library, some three minutes on two CPU
    cores. Prints the held-out bits per byte before and after, beside those of an order-2 byte model
    fitted to the same training text, and a continuation of a held-out text; leaves a folder with
    config.json, metrics.jsonl, loss.png, sample.txt and checkpoint.pt.
    """
    flags = {
        name: value for name, value in locals().items() if value is not None and name != "margin"
    }
    console = Console()
    with usage_errors():
        run, folder = open_run(TitanMACRun, flags)
    with usage_errors(folder.config_file if resume else None):
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
            model,
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
        next_token_loss,
        chosen,
        training,
        folder,
        evaluate=evaluation,
        console=console,
        observe=observe,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"TitanMAC ({run.variant}), {parameters:,} parameters, {len(corpus.training):,} tokens to "
        f"train on, {len(corpus.held_out):,} held out, {run.device}, {run.mixed_precision}, into "
        f"{folder.path}",
        highlight=False,
    )
    train(trainer, run, folder, resumed=resume is not None)
    model.eval()
    _show_sample(console, folder, model, corpus, run.seed)
    reached = _report(console, folder)
    results_in(console, folder)
    if margin is not None and not reached >= margin:
        console.print(
            f"wanted {margin} bits per byte or more below the order-2 byte model; got {reached:.4f}"
        )
        raise typer.Exit(1)


def _show_sample(
    console: Console, folder: RunFolder, model: TitanMAC, corpus: Corpus, seed: int
) -> None:
    """The beginning of the held-out text, continued, on the console and in a file."""
    prompt = corpus.held_out[:PROMPT_TOKENS].cpu().numpy()
    shown = corpus.tokenizer.decode(prompt)
    text = continued(
        model,
        corpus.tokenizer,
        prompt,
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
