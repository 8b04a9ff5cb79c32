"""Checks of arguments that several families make, before any memory is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.checks import check_floating, checked_number
from .reference import ACTIVATIONS

Tensor = torch.Tensor

ACTIVATION_NAMES = tuple(ACTIVATIONS)
REDUCTIONS = ("sum", "mean_feature", "mean_all")
READS = ("after", "before")


def are_plain(
    tensors: Sequence[object],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[tuple[torch.dtype, ...]],
    device: torch.device,
) -> bool:
    """Whether these are strided tensors on the device, each of its shape and one of its dtypes.

    A repeated call asks this first: the checks that say what is wrong take the host longer.
    """
    for x, shape, allowed in zip(tensors, shapes, dtypes, strict=True):
        if (
            not isinstance(x, Tensor)
            or x.layout is not torch.strided
            or x.is_nested
            or x.shape != shape
            or x.dtype not in allowed
            or x.device != device
        ):
            return False
    return True


def check_heads(name: str, x: Tensor) -> None:
    """Rows of heads, [B, T, heads, D]."""
    check_floating(name, x)
    if x.ndim != 4 or not x.shape[-1]:
        raise ValueError(f"{name} must be [B, T, heads, D] with D at least 1, got {tuple(x.shape)}")


def check_switch(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def checked_positive(name: str, value: float) -> float:
    """``value`` as a float; it must be a finite real number above 0."""
    number = checked_number(name, value)
    if number <= 0.0:
        raise ValueError(f"{name} must be a finite number above 0, got {value}")
    return number
