"""The subcommand that trains a TitanMAC on text."""

from __future__ import annotations

from typing import Annotated

import typer
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
)
from .presets import TitanMACPresetName
from .text import TextBatch
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
from .titan_mac import TitanMAC
from .titan_mac_config import Variant
from .titan_mac_run import TitanMACRun


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
    """Train a TitanMAC: a language model with a neural memory that learns while it reads.

    Without flags: bytes of the running Python's standard library, some three minutes on two CPU
    cores. Prints the held-out bits per byte before and after, beside those of an order-2 byte model
    fitted to the same training text, and a continuation of a held-out text; leaves a folder with
    config.json, metrics.jsonl, loss.png, sample.txt and checkpoint.pt.
    """
    train_on_text(TitanMACRun, next_token_loss, chosen_flags(locals()), margin)
