"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch

from ._backends import check_backend

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_rows(x: torch.Tensor) -> None:
    """x must be a floating tensor with at least one axis."""
    check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis to normalise, got a scalar")


def check_square(x: torch.Tensor) -> None:
    """x must be a floating tensor of square matrices."""
    check_floating("x", x)
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"x must hold square matrices [..., n, n], got shape {tuple(x.shape)}")


def check_vector(name: str, vector: torch.Tensor, x: torch.Tensor) -> None:
    """A weight or bias must hold one floating number for each column of x, on x's device."""
    check_floating(name, vector)
    if vector.ndim != 1 or vector.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name} must have shape ({x.shape[-1]},), one number for each column of x, "
            f"got {tuple(vector.shape)}"
        )
    check_device(name, vector, x)


def check_same(name: str, other: torch.Tensor, x: torch.Tensor) -> None:
    """A second operand must have x's shape, dtype and device."""
    check_floating(name, other)
    if other.shape != x.shape:
        raise ValueError(f"{name} must have x's shape {tuple(x.shape)}, got {tuple(other.shape)}")
    if other.dtype != x.dtype:
        raise ValueError(f"{name} must have x's dtype {x.dtype}, got {other.dtype}")
    check_device(name, other, x)


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def check_device(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")


def checked_eps(eps: float | None, x: torch.Tensor) -> float:
    """eps as a float; None means the machine epsilon of the precision of the statistics."""
    if eps is None:
        return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return checked_number("eps", eps, lowest=0.0)


def checked_number(name: str, value: float, lowest: float = -math.inf) -> float:
    """``value`` as a float; it must be a finite real number, and not below ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, (float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not lowest <= value < math.inf or value == -math.inf:
        bound = "" if lowest == -math.inf else f" of at least {lowest:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {value}")
    return float(value)


def checked_count(name: str, value: int) -> int:
    """``value`` as an int; it must be a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        wanted = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


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
