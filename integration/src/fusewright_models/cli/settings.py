"""What training runs are asked for: dataclasses whose fields are the options of the commands, the
names of config.json and those of a file of settings. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..choices import (
    DATA_NAMES,
    Backend,
    BatchParallel,
    Checkpointing,
    HybridPresetName,
    IndexerForm,
    MemoryRule,
    Mode,
    Norm,
    OptimizerName,
    Parallel,
    Precision,
    PresetName,
    Scale,
    Schedule,
    TitanMACPresetName,
    Variant,
    WholeCheckpointing,
)
from .options import (
    LARGEST_SEED,
    check_fields,
    of_data,
    of_devices,
    of_folder,
    of_model,
    of_training,
)

# Steps of a rate above it are a slip of an exponent: 1 is the learned optimizer's own.
LARGEST_RATE = 10.0
# Of the text that a run ends with, and of `generate`.
SAMPLE_TOKENS, TEMPERATURE = 256, 0.8
PRESET_HELP = "Sizes of model and training. Default: demo."


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that one training run is asked for, with nothing left open.

    Attributes:
        model_name: of the command.
        decay: of weights, where no other is asked for.
    """

    model_name: ClassVar[str]
    decay: ClassVar[float]

    preset: str
    steps: Annotated[int, of_training(min=1, help="Optimizer steps.")]
    batch_size: int
    gradient_accumulation_steps: Annotated[
        int, of_training(min=1, help="Batches per optimizer step. Default: the preset's.")
    ] = 1
    optimizer: Annotated[OptimizerName, of_training(help="Default: adamw.")] = "adamw"
    optimizer_weights: Annotated[
        str | None,
        of_training(help="Of the optimizer learned: a safetensors file. Default: what it ships."),
    ] = None
    lr: Annotated[
        float,
        of_training(
            min=0.0,
            max=LARGEST_RATE,
            help="Peak rate. Default: the preset's; 0.1 of the optimizer learned.",
        ),
    ]
    warmup_steps: Annotated[
        int | None,
        of_training(min=0, help="Steps to the peak rate. Default: a twentieth of all."),
    ] = None
    schedule: Annotated[
        Schedule,
        of_training(help="Of the rate behind the warm-up, down to zero or not. Default: cosine."),
    ] = "cosine"
    weight_decay: Annotated[float, of_training(min=0.0, max=LARGEST_RATE, help="Of matrices.")]
    beta1: Annotated[
        float, of_training(min=0.0, max=1.0, help="Share of the first moment kept. Default: 0.9.")
    ] = 0.9
    beta2: Annotated[
        float, of_training(min=0.0, max=1.0, help="Likewise of the second. Default: 0.95.")
    ] = 0.95
    clip_norm: Annotated[
        float, of_training(min=0.0, help="Largest norm of all gradients. Default: 1.")
    ] = 1.0
    seed: Annotated[
        int,
        of_training(min=0, max=LARGEST_SEED, help="Of weights and batches. Default: 0."),
    ] = 0
    init_from: Annotated[
        str | None,
        of_training(
            help="Begin with the weights of a run's folder, an exported one or a repository of the "
            "Hugging Face hub."
        ),
    ] = None
    init_revision: Annotated[
        str | None,
        of_training(
            help="Commit, tag or branch of that repository. Default: its newest commit. The run "
            "keeps which it was."
        ),
    ] = None
    precision: Annotated[
        Precision, of_devices(help="bf16 is autocast over fp32 parameters. Default: bf16 on cuda.")
    ]
    device: Annotated[str, of_devices(help="Default: cuda where there is one.")]
    parallel: Annotated[
        Parallel | None,
        of_devices(
            help="How the processes of torchrun train together: each with the whole model, or with "
            "a part of all parameters, or each host with the whole, on a part of the tasks; or "
            "with the whole on a part of each task's rows. Default: ddp."
        ),
    ] = None
    compile: Annotated[bool, of_devices(help="Default: --no-compile.")] = False
    capture: Annotated[
        bool | None,
        of_devices(help="Replay steps from CUDA graphs. Default: on cuda, where that can be done."),
    ] = None
    checkpointing: Annotated[
        Checkpointing,
        of_devices(
            help="Compute again in the backward pass, rather than keep: nothing, blocks, or blocks "
            "but for their attention. Default: none."
        ),
    ] = "none"
    backend: Annotated[
        Backend, of_devices(help="Triton kernels or plain torch. Default: auto.")
    ] = "auto"
    log_every: Annotated[int, of_folder(min=1, help="Steps between log points. Default: 10.")] = 10
    eval_every: Annotated[int, of_folder(min=1, help="Steps between evaluations.")]
    eval_share: Annotated[
        float,
        of_folder(
            min=0.0,
            max=1.0,
            help="Of the run that evaluations may take: those before the last one read as much "
            "less of what is held out. 1 has all of them read everything. Default: 0.03.",
        ),
    ] = 0.03
    checkpoint_every: Annotated[
        str | None,
        of_folder(
            help="Steps between checkpoints, such as 500, or minutes, such as 10m. Default: one "
            "with every evaluation."
        ),
    ] = None
    keep: Annotated[int, of_folder(min=1, help="How many of the last checkpoints. Default: 2.")] = 2
    profile: Annotated[
        str | None,
        of_folder(help="Steps, such as 10:20, of which trace.json.gz tells what runs when."),
    ] = None
    memory_snapshot: Annotated[
        bool,
        of_folder(help="Leave memory.pickle: who has allocated what on the GPU. Default: not."),
    ] = False
    tensorboard: Annotated[
        bool, of_folder(help="Write the metrics as events for TensorBoard, too. Default: not.")
    ] = False
    wandb: Annotated[
        bool, of_folder(help="Show the metrics to Weights & Biases, too. Default: not.")
    ] = False
    wandb_project: Annotated[str, of_folder(help="Of the run there. Default: fusewright.")] = (
        "fusewright"
    )

    def __post_init__(self) -> None:
        """
        Raises:
            TypeError: a field is of another type.
            ValueError: a field has a value that it cannot have, whatever the others are.
        """
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TransformerNPSettings(Settings):
    """Of a run of TransformerNP."""

    model_name: ClassVar[str] = "transformer-np"
    decay: ClassVar[float] = 0.01

    preset: Annotated[PresetName, of_model(help=PRESET_HELP)]
    norm: Annotated[Norm, of_model(help="Before or after. Default: pre.")] = "pre"
    scale: Annotated[Scale, of_model(help="Standard deviations as. Default: log_sigma.")] = (
        "log_sigma"
    )
    frequencies: Annotated[
        int,
        of_model(
            min=0, help="Sines and cosines of each coordinate at so many octaves. Default: 0."
        ),
    ] = 0
    indicator: Annotated[
        bool, of_model("--indicator", help="Tell context rows by one more input.")
    ] = False
    data: Annotated[
        str,
        of_data(
            help=f"{', '.join(DATA_NAMES)}, or a CSV or parquet file with the columns of --inputs "
            "and --output. Default: digits."
        ),
    ] = "digits"
    inputs: Annotated[
        str | None, of_data(help="Columns of the file that are inputs, such as a,b.")
    ] = None
    output: Annotated[str | None, of_data(help="Its column that is predicted.")] = None
    batch_size: Annotated[int, of_data(min=1, help="Tasks per batch.")]
    context_size: Annotated[
        str | None, of_data(help="Context points, such as 64 or 3-46, one draw per batch.")
    ] = None
    target_size: Annotated[str | None, of_data(help="Target points, likewise.")] = None
    ragged: Annotated[
        bool, of_data("--ragged", help="One draw of context points per task, padded.")
    ] = False
    pad: Annotated[
        bool | None,
        of_data(
            help="Pad batches to a few of the drawn sizes, for as many graphs. Default: on where "
            "steps are captured."
        ),
    ] = None
    ahead: Annotated[
        int | None,
        of_data(min=1, help="Draw so many batches of one shape at once."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Of a run of a language model.

    ``vocab_size`` None is that of the tokenizer, ``dataset`` None the standard library,
    ``tokenizer`` None bytes. A model's own settings add the sizes that flags may change.
    """

    decay: ClassVar[float] = 0.1

    parallel: Annotated[
        BatchParallel | None,
        of_devices(
            help="How the processes of torchrun train together: each with the whole model, or with "
            "a part of all parameters, or each host with the whole. Default: ddp."
        ),
    ] = None
    vocab_size: Annotated[int | None, of_model(min=1, help="Default: the tokenizer's.")] = None
    dataset: Annotated[
        str | None,
        of_data(
            help="A Hugging Face name, a parquet, JSON-lines or text file, or a folder of such. "
            "Default: the sources of Python's standard library."
        ),
    ] = None
    dataset_subset: Annotated[
        str | None, of_data(help="Configuration of a Hugging Face data set.")
    ] = None
    dataset_revision: Annotated[
        str | None,
        of_data(
            help="Commit, tag or branch of a Hugging Face data set. Default: its newest commit. "
            "The run keeps which it was, and reads that one again."
        ),
    ] = None
    text_column: Annotated[str, of_data(help="Column that holds the text. Default: text.")] = "text"
    dataset_tokens: Annotated[
        int, of_data(min=1, help="Tokens to read for training. Default: what the run reads.")
    ]
    tokenizer: Annotated[str | None, of_data(help="A tokenizers file or name. Default: bytes.")] = (
        None
    )
    cache: Annotated[
        str | None,
        of_data(
            help="Folder that keeps the tokens of --dataset for later runs. Default: "
            "fusewright/text in the user's cache."
        ),
    ] = None
    seq_len: Annotated[int, of_data(min=1, help="Tokens of a window.")]
    documents: Annotated[
        bool,
        of_data(
            "--documents",
            help="Windows begin where documents do, and predict nothing from another document.",
        ),
    ] = False
    documents_per_window: Annotated[
        int,
        of_data(
            min=1,
            help="With --documents: how many a window holds at most, each read as if it were "
            "alone. Default: 1.",
        ),
    ] = 1
    batch_size: Annotated[int, of_data(min=1, help="Windows per batch.")]


@dataclass(frozen=True, kw_only=True)
class TitanMACSettings(TextSettings):
    """Of a run of TitanMAC."""

    model_name: ClassVar[str] = "titan-mac"

    preset: Annotated[TitanMACPresetName, of_model(help=PRESET_HELP)]
    variant: Annotated[Variant, of_model(help="How the memory goes with attention. Default: mac.")]
    dim: Annotated[int, of_model(min=1, help="Model width.")]
    num_layers: Annotated[int, of_model(min=1)]
    num_heads: Annotated[int, of_model(min=1)]
    chunk_size: Annotated[
        int, of_model(min=1, help="Segment of mac, window of mag and mal, in tokens.")
    ]
    memory_chunk: Annotated[
        int, of_model(min=1, help="Tokens whose memory gradients share their weights.")
    ]
    memory_rule: Annotated[
        MemoryRule,
        of_model(help="How a memory learns, forgets and is read: docs/models/titan-mac.md."),
    ]
    memory_layers: Annotated[int, of_model(min=1, help="Of a memory.")]
    memory_length: Annotated[
        float,
        of_model(
            min=1.0, help="Tokens, above 1, that a memory is meant for: it begins to forget so."
        ),
    ]
    checkpointing: Annotated[
        WholeCheckpointing,
        of_devices(
            help="Compute again in the backward pass, rather than keep: nothing, or blocks. "
            "Default: none."
        ),
    ] = "none"


@dataclass(frozen=True, kw_only=True)
class HybridSettings(TextSettings):
    """Of a run of HybridLM."""

    model_name: ClassVar[str] = "hybrid"

    preset: Annotated[HybridPresetName, of_model(help=PRESET_HELP)]
    num_layers: Annotated[int, of_model(min=1, help="Every fourth is sparse attention.")]
    selected_keys: Annotated[int, of_model(min=1, help="That a typical query attends to.")]
    indexer_temperature: Annotated[
        float, of_model(min=0.0, help="Where the indexers' own begin. Default: the preset's.")
    ]
    indexer_form: Annotated[
        IndexerForm,
        of_model(help="Of the indexers' scores: docs/models/hybrid.md. Default: gated."),
    ]
    indexer_rotary: Annotated[
        int,
        of_model(min=0, help="Columns of the indexers that have rotary positions. Default: none."),
    ]
    mode: Annotated[
        Mode,
        of_model(
            help="How states come back in the backward pass: recomputed, stored, or stored with "
            "all that autograd keeps. Default: exact."
        ),
    ]
    indexer_warmup: Annotated[
        int,
        of_training(
            min=0,
            help="Steps whose attention goes to all keys, so that indexers see what it looks for. "
            "Default: a tenth of all.",
        ),
    ]
    indexer_rate: Annotated[
        float,
        of_training(min=0.0, help="Of the indexers over the others'. Default: 1."),
    ]
