"""The names that a choice may have, free of torch: a command line offers them before it imports
anything of that.
"""

from __future__ import annotations

from typing import Literal, get_args

# Of the data of TransformerNP.
DataName = Literal["digits", "gp-rbf", "gp-matern", "gp-periodic", "blr", "prior"]
DATA_NAMES = get_args(DataName)

# Of models.
Norm = Literal["pre", "post"]
MemoryRule = Literal["normed", "paper", "origin"]
Variant = Literal["mac", "mag", "mal", "lmm"]
VARIANTS = get_args(Variant)
Checkpointing = Literal["none", "block", "keep-attention"]
CHECKPOINTINGS = get_args(Checkpointing)
WholeCheckpointing = Literal["none", "block"]

# Of packages, whose own import torch: fusewright.attention, .mixture_head, .reversible and .gsa.
Backend = Literal["auto", "triton", "reference"]
Scale = Literal["log_sigma", "softplus"]
Mode = Literal["exact", "stored", "plain"]
IndexerForm = Literal["gated", "relu"]

# Of the training.
OptimizerName = Literal["adamw", "nested", "m3", "muon", "learned", "torch-adamw"]
OPTIMIZER_NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
# Of the rate behind its warm-up.
Schedule = Literal["cosine", "linear", "constant"]
SCHEDULES = get_args(Schedule)
Precision = Literal["fp32", "bf16"]
PRECISIONS = get_args(Precision)
BatchParallel = Literal["ddp", "fsdp", "hsdp"]
Parallel = Literal["ddp", "fsdp", "hsdp", "context"]
PARALLELS = get_args(Parallel)

# What choices were called before: in flags, config.json and checkpoints these go on working.
FORMER = {"max_steps": "steps", "mixed_precision": "precision"}

# Of sizes of model and training.
PresetName = Literal["tiny", "demo", "small", "regressor", "base"]
TitanMACPresetName = Literal["tiny", "demo", "l4", "profile", "170m"]
HybridPresetName = Literal["tiny", "demo", "mini", "350m", "1b"]
