"""What is timed and against whom: ``python -m fusewright_testkit.bench example``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from fusewright.example import scale
from fusewright.example.elementwise import reference
from fusewright_testkit import Case

FACTOR = 0.3


def cases() -> list[Case]:
    """The op at sizes below and above the caches, in bf16."""
    return [case(elements) for elements in (1 << 20, 1 << 26)]


def case(elements: int) -> Case:
    traffic = 2 * elements * torch.bfloat16.itemsize
    return Case(
        op="scale",
        sizes={"elements": elements},
        dtype=torch.bfloat16,
        reference=functools.partial(reference.scale, factor=FACTOR),
        inputs=functools.partial(inputs, elements),
        bytes_moved={"fwd": traffic, "bwd": traffic, "fwd+bwd": 2 * traffic},
    )


def inputs(elements: int, device: str) -> list[torch.Tensor]:
    return [torch.randn(elements, dtype=torch.bfloat16, device=device)]


def providers() -> dict[str, dict[str, Callable[..., torch.Tensor]]]:
    """Ours and torch."""
    return {
        "fusewright": {"scale": functools.partial(scale, factor=FACTOR)},
        "torch": {"scale": lambda x: x * FACTOR},
    }
