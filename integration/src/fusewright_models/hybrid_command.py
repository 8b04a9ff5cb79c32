"""The subcommand that trains a HybridLM on text."""

from __future__ import annotations

from typing import Annotated

import typer
from fusewright.reversible import Mode

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
)
from .hybrid import HybridLM
from .hybrid_run import HybridBatch, HybridRun
from .presets import HybridPresetName
from .text_command import (
    AccumulationSteps,
    BatchSize,
    Dataset,
    DatasetSubset,
    DatasetTokens,
    Margin,
    MaxSteps,
    Out,
    Resume,
    Seed,
    SeqLen,
    TextColumn,
    TokenizerChoice,
    VocabSize,
    WandB,
    WandBProject,
    WeightDecay,
    chosen_flags,
    train_on_text,
)
from .training import Told


def all_losses(model: HybridLM, batch: HybridBatch) -> Told:
    """The loss to train on, its parts, and whether the stack's states left their range."""
    losses = model.losses(batch.windows, dense=batch.dense)
    means = {
        "next_token_loss": losses.following,
        "second_token_loss": losses.second,
        "indexer_loss": losses.indexer,
        "selected_keys": losses.selected,
    }
    return Told(losses.total, means, {"saturated_batches": losses.saturated})


def hybrid(
    preset: Annotated[
        HybridPresetName | None, typer.Option(help="Sizes of model and training. Default: demo.")
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Every fourth is sparse attention.")
    ] = None,
    selected_keys: Annotated[
        int | None, typer.Option(min=1, help="That a typical query attends to.")
    ] = None,
    indexer_warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps whose attention goes to all keys, so that indexers see what it looks for. "
            "Default: a tenth of all.",
        ),
    ] = None,
    indexer_rate: Annotated[
        float | None, typer.Option(min=0.0, help="Of the indexers over the others'. Default: 1.")
    ] = None,
    indexer_temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Where the indexers' own begin. Default: the preset's."),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="How states come back in the backward pass: recomputed, stored, or stored with "
            "all that autograd keeps. Default: exact."
        ),
    ] = None,
    vocab_size: VocabSize = None,
    seq_len: SeqLen = None,
    dataset: Dataset = None,
    dataset_subset: DatasetSubset = None,
    text_column: TextColumn = None,
    dataset_tokens: DatasetTokens = None,
    tokenizer: TokenizerChoice = None,
    batch_size: BatchSize = None,
    gradient_accumulation_steps: AccumulationSteps = None,
    optimizer: OptimizerChoice = None,
    optimizer_weights: OptimizerWeights = None,
    lr: PeakRate = None,
    weight_decay: WeightDecay = None,
    max_steps: MaxSteps = None,
    mixed_precision: PrecisionChoice = None,
    device: Device = None,
    seed: Seed = None,
    compile: Compile = None,
    capture: CaptureChoice = None,
    backend: BackendChoice = None,
    log_every: LogEvery = None,
    eval_every: EvaluateEvery = None,
    wandb: WandB = None,
    wandb_project: WandBProject = None,
    out: Out = None,
    resume: Resume = None,
    margin: Margin = None,
) -> None:
    """Train a HybridLM: gated delta rule and learned sparse attention in a reversible stack.

    Without flags: bytes of the running Python's standard library, some minutes on two CPU cores.
    Prints the held-out bits per byte of the next token before and after, beside those of an order-2
    byte model fitted to the same training text, and a continuation of a held-out text; leaves a
    folder with config.json, metrics.jsonl, loss.png, sample.txt and checkpoint.pt.
    """
    train_on_text(HybridRun, all_losses, chosen_flags(locals()), margin)
