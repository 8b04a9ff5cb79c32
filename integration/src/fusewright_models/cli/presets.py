"""Named sizes of model and training for the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..models.hybrid import HYBRID
from ..models.titan_mac import TITAN_MAC


class TransformerNPPreset(NamedTuple):
    """Defaults that the flags of ``fusewright-train transformer-np`` override one by one.

    Attributes:
        architecture: fields of ``TransformerNPConfig``; what they leave out is the 12-layer model.
        steps: optimizer steps.
        batch_size: tasks per step.
        lr: peak learning rate.
        evaluate_every: steps between two evaluations.
        evaluation_batches: batches of the evaluation at the end, each with sizes of its own.
        evaluation_batch_size: tasks of such a batch.
    """

    architecture: dict[str, Any]
    steps: int
    batch_size: int
    lr: float
    evaluate_every: int
    evaluation_batches: int
    evaluation_batch_size: int = 16

    @property
    def evaluation_tasks(self) -> int:
        """Of the evaluation at the end."""
        return self.evaluation_batches * self.evaluation_batch_size


class TextPreset(NamedTuple):
    """Defaults that the flags of a language model's command override one by one.

    Attributes:
        architecture: of the model; its vocabulary is that of the tokenizer.
        steps: optimizer steps.
        batch_size: windows that go through the model together.
        gradient_accumulation_steps: such batches per optimizer step.
        seq_len: tokens that a window reads.
        lr: peak learning rate.
        evaluate_every: steps between two evaluations.
        held_out_bytes: at most so many bytes are held out; the evaluation at the end reads all.
    """

    architecture: Any
    steps: int
    batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    lr: float
    evaluate_every: int
    held_out_bytes: int


# Of each model "tiny" takes seconds on anything, for tests and for a first look at the files of a
# run, and "demo" minutes on two CPU cores.
TINY_NP = dict(width=32, layers=2, heads=2, feed_forward_width=85, components=3)
DEMO_NP = dict(width=48, layers=4, heads=6, feed_forward_width=128, components=10)
SMALL_NP = dict(width=256, layers=6, heads=4, feed_forward_width=512, components=10)
# 2.3 million parameters: less than 5 MB in 16 bits.
REGRESSOR_NP = dict(width=192, layers=8, heads=6, feed_forward_width=256, components=6)
DEMO_TITAN_MAC = replace(TITAN_MAC["tiny"], dim=128, memory_chunk=32, memory_hidden=32)
DEMO_HYBRID = replace(HYBRID["tiny"], dim=96, delta_width=48, sparse_width=48)

TRANSFORMER_NP: dict[str, TransformerNPPreset] = {
    # architecture, steps, batch_size, lr, evaluate_every, evaluation_batches and their batch size
    "tiny": TransformerNPPreset(TINY_NP, 100, 8, 2e-3, 50, 4, 8),
    "demo": TransformerNPPreset(DEMO_NP, 2000, 32, 1.5e-3, 200, 64),
    # For minutes of one GPU.
    "small": TransformerNPPreset(SMALL_NP, 60_000, 128, 2e-3, 5000, 256),
    # Likewise, of the data "prior".
    "regressor": TransformerNPPreset(REGRESSOR_NP, 100_000, 128, 2e-3, 10_000, 128),
    # The 36.7 million parameters of the model, for a GPU.
    "base": TransformerNPPreset({}, 20_000, 128, 5e-4, 1000, 256),
}

# architecture, steps, batch_size, gradient_accumulation_steps, seq_len, lr, evaluate_every,
# held_out_bytes
TITAN_MAC_PRESETS: dict[str, TextPreset] = {
    "tiny": TextPreset(TITAN_MAC["tiny"], 100, 4, 1, 128, 4e-3, 50, 2**11),
    "demo": TextPreset(DEMO_TITAN_MAC, 800, 8, 1, 128, 2e-3, 400, 2**15),
    # Half a million tokens a step, for a GPU of 22 GB.
    "l4": TextPreset(TITAN_MAC["l4"], 10_000, 4, 32, 4096, 4e-4, 1000, 2**22),
    # Short windows: what a profiler looks at.
    "profile": TextPreset(TITAN_MAC["profile"], 1000, 4, 1, 512, 4e-4, 500, 2**16),
    "170m": TextPreset(TITAN_MAC["170m"], 30_000, 8, 16, 4096, 4e-4, 1000, 2**22),
}
HYBRID_PRESETS: dict[str, TextPreset] = {
    "tiny": TextPreset(HYBRID["tiny"], 100, 4, 1, 128, 4e-3, 50, 2**11),
    "demo": TextPreset(DEMO_HYBRID, 400, 8, 1, 128, 4e-3, 200, 2**14),
    "mini": TextPreset(HYBRID["mini"], 10_000, 16, 1, 1024, 1e-3, 1000, 2**20),
    # Half a million tokens a step, here and below.
    "350m": TextPreset(HYBRID["350m"], 30_000, 8, 16, 4096, 4e-4, 1000, 2**22),
    "1b": TextPreset(HYBRID["1b"], 50_000, 4, 32, 4096, 2e-4, 1000, 2**22),
}
