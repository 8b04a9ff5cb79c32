"""Named sizes of model and training for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

PresetName = Literal["tiny", "demo", "base"]
PRESET_NAMES = get_args(PresetName)


@dataclass(frozen=True)
class TransformerNPPreset:
    """Defaults that the flags of ``fusewright-train transformer-np`` override one by one.

    Attributes:
        architecture: fields of ``TransformerNPConfig``; what they leave out is the 12-layer model.
        steps: optimizer steps.
        batch_size: tasks per step.
        lr: peak learning rate.
        evaluate_every: steps between two evaluations.
        evaluation_batches: batches of an evaluation, each with sizes of its own.
        evaluation_batch_size: tasks of such a batch.
    """

    architecture: dict[str, Any]
    steps: int
    batch_size: int
    lr: float
    evaluate_every: int
    evaluation_batches: int
    evaluation_batch_size: int


TRANSFORMER_NP: dict[PresetName, TransformerNPPreset] = {
    # Seconds on anything: for tests and for a first look at the files of a run.
    "tiny": TransformerNPPreset(
        architecture={
            "width": 32,
            "layers": 2,
            "heads": 2,
            "feed_forward_width": 85,
            "components": 3,
        },
        steps=100,
        batch_size=8,
        lr=2e-3,
        evaluate_every=50,
        evaluation_batches=4,
        evaluation_batch_size=16,
    ),
    # Minutes on two CPU cores.
    "demo": TransformerNPPreset(
        architecture={
            "width": 48,
            "layers": 4,
            "heads": 6,
            "feed_forward_width": 128,
            "components": 10,
        },
        steps=2000,
        batch_size=32,
        lr=1.5e-3,
        evaluate_every=200,
        evaluation_batches=64,
        evaluation_batch_size=16,
    ),
    # The 36.7 million parameters of the model, for a GPU.
    "base": TransformerNPPreset(
        architecture={},
        steps=20_000,
        batch_size=128,
        lr=5e-4,
        evaluate_every=1000,
        evaluation_batches=256,
        evaluation_batch_size=16,
    ),
}
