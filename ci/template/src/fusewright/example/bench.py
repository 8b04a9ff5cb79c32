"""What `nox -s bench` times, and against whom."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import reference, scale

FACTOR = 0.3


class Case(NamedTuple):
    """One op at one size."""

    op: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reference: Callable[..., torch.Tensor]
    inputs: Callable[[str], list[torch.Tensor]]
    bytes_moved: dict[str, int]
    flops: dict[str, int]


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
        flops={},
    )


def inputs(elements: int, device: str) -> list[torch.Tensor]:
    return [torch.randn(elements, dtype=torch.bfloat16, device=device)]


def providers() -> dict[str, dict[str, Callable[..., torch.Tensor]]]:
    """Ours and torch."""
    return {
        "fusewright": {"scale": functools.partial(scale, factor=FACTOR)},
        "torch": {"scale": lambda x: x * FACTOR},
    }
