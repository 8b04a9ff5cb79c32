"""Named sizes of model and training for the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

from .hybrid_config import HYBRID, HybridConfig
from .titan_mac import TITAN_MAC
from .titan_mac_config import TitanMACConfig

PresetName = Literal["tiny", "demo", "base"]
PRESET_NAMES = get_args(PresetName)
TitanMACPresetName = Literal["tiny", "demo", "l4", "profile", "170m"]
HybridPresetName = Literal["tiny", "demo", "mini", "350m", "1b"]
ShapeT = TypeVar("ShapeT")


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


@dataclass(frozen=True)
class TextPreset(Generic[ShapeT]):
    """Defaults that the flags of a language model's command override one by one.

    Attributes:
        architecture: of the model; its vocabulary is that of the tokenizer.
        steps: optimizer steps.
        batch_size: windows that go through the model together.
        gradient_accumulation_steps: such batches per optimizer step.
        seq_len: tokens that a window reads.
        lr: peak learning rate.
        evaluate_every: steps between two evaluations.
        held_out_bytes: at most so many bytes are held out, all of which an evaluation reads.
    """

    architecture: ShapeT
    steps: int
    batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    lr: float
    evaluate_every: int
    held_out_bytes: int


TITAN_MAC_PRESETS: dict[TitanMACPresetName, TextPreset[TitanMACConfig]] = {
    # Seconds on anything: for tests and for a first look at the files of a run.
    "tiny": TextPreset(
        architecture=TITAN_MAC["tiny"],
        steps=100,
        batch_size=4,
        gradient_accumulation_steps=1,
        seq_len=128,
        lr=4e-3,
        evaluate_every=50,
        held_out_bytes=2**12,
    ),
    # Minutes on two CPU cores.
    "demo": TextPreset(
        architecture=replace(TITAN_MAC["tiny"], dim=128, memory_chunk=32, memory_hidden=32),
        steps=800,
        batch_size=8,
        gradient_accumulation_steps=1,
        seq_len=128,
        lr=2e-3,
        evaluate_every=400,
        held_out_bytes=2**17,
    ),
    # Half a million tokens a step, for a GPU of 22 GB.
    "l4": TextPreset(
        architecture=TITAN_MAC["l4"],
        steps=10_000,
        batch_size=4,
        gradient_accumulation_steps=32,
        seq_len=4096,
        lr=4e-4,
        evaluate_every=1000,
        held_out_bytes=2**22,
    ),
    # Short windows: what a profiler looks at.
    "profile": TextPreset(
        architecture=TITAN_MAC["profile"],
        steps=1000,
        batch_size=4,
        gradient_accumulation_steps=1,
        seq_len=512,
        lr=4e-4,
        evaluate_every=500,
        held_out_bytes=2**20,
    ),
    "170m": TextPreset(
        architecture=TITAN_MAC["170m"],
        steps=30_000,
        batch_size=8,
        gradient_accumulation_steps=16,
        seq_len=4096,
        lr=4e-4,
        evaluate_every=1000,
        held_out_bytes=2**22,
    ),
}


HYBRID_PRESETS: dict[HybridPresetName, TextPreset[HybridConfig]] = {
    # Seconds on anything: for tests and for a first look at the files of a run.
    "tiny": TextPreset(
        architecture=HYBRID["tiny"],
        steps=100,
        batch_size=4,
        gradient_accumulation_steps=1,
        seq_len=128,
        lr=4e-3,
        evaluate_every=50,
        held_out_bytes=2**12,
    ),
    # Minutes on two CPU cores.
    "demo": TextPreset(
        architecture=replace(HYBRID["tiny"], dim=96, delta_width=48, sparse_width=48),
        steps=400,
        batch_size=8,
        gradient_accumulation_steps=1,
        seq_len=128,
        lr=4e-3,
        evaluate_every=200,
        held_out_bytes=2**15,
    ),
    "mini": TextPreset(
        architecture=HYBRID["mini"],
        steps=10_000,
        batch_size=16,
        gradient_accumulation_steps=1,
        seq_len=1024,
        lr=1e-3,
        evaluate_every=1000,
        held_out_bytes=2**20,
    ),
    # Half a million tokens a step.
    "350m": TextPreset(
        architecture=HYBRID["350m"],
        steps=30_000,
        batch_size=8,
        gradient_accumulation_steps=16,
        seq_len=4096,
        lr=4e-4,
        evaluate_every=1000,
        held_out_bytes=2**22,
    ),
    "1b": TextPreset(
        architecture=HYBRID["1b"],
        steps=50_000,
        batch_size=4,
        gradient_accumulation_steps=32,
        seq_len=4096,
        lr=2e-4,
        evaluate_every=1000,
        held_out_bytes=2**22,
    ),
}
