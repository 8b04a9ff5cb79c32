"""Checks of the norms' arguments, before any memory is touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.backends import check_backend
from .._core.checks import check_device, check_floating, checked_number


def check_rows(x: torch.Tensor) -> None:
    """x must be a floating tensor with at least one axis."""
    check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis to normalise, got a scalar")


def check_vector(name: str, vector: torch.Tensor | None, x: torch.Tensor) -> None:
    """A weight or bias must hold one floating number for each column of x, on x's device, or be
    absent.
    """
    if vector is None:
        return
    check_floating(name, vector)
    if vector.ndim != 1 or vector.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name} must have shape ({x.shape[-1]},), one number for each column of x, "
            f"got {tuple(vector.shape)}"
        )
    check_device(name, vector, "x", x)


def checked_eps(eps: float | None, x: torch.Tensor) -> float:
    """eps as a float; None means the machine epsilon of the precision of the statistics."""
    if eps is None:
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return checked_number("eps", eps, lowest=0.0)


def check_module(normalized_shape: int | Sequence[int], backend: str) -> None:
    """A module's own arguments, before torch's constructor sees them."""
    if not isinstance(normalized_shape, int) and len(normalized_shape) == 0:
        raise ValueError("normalized_shape must name at least one axis, got ()")
    check_backend(backend)


def flat_rows(
    x: torch.Tensor, normalized_shape: Sequence[int], *vectors: torch.Tensor | None
) -> tuple[torch.Tensor, *tuple[torch.Tensor | None, ...]]:
    """x with the axes of ``normalized_shape`` made one, and the module's vectors likewise."""
    check_rows(x)
    axes = len(normalized_shape)
    if tuple(x.shape[x.ndim - axes :]) != tuple(normalized_shape) or x.ndim < axes:
        raise ValueError(
            f"the last axes of x must be {tuple(normalized_shape)}, got x of shape {tuple(x.shape)}"
        )
    if axes == 1:
        return x, *vectors
    return x.flatten(x.ndim - axes), *(None if v is None else v.flatten() for v in vectors)
