"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """A second operand must have the first one's shape, dtype and device."""
    check_floating(name, tensor)
    for what in ("shape", "dtype", "device"):
        found, wanted = getattr(tensor, what), getattr(other, what)
        if found != wanted:
            found, wanted = (tuple(v) if what == "shape" else v for v in (found, wanted))
            raise ValueError(f"{name} must have {other_name}'s {what} {wanted}, got {found}")


def check_rows(x: torch.Tensor, weight: torch.Tensor) -> None:
    """x must hold rows that ``weight [..., d]`` can multiply, on its device and, unless autocast
    makes them so, in its dtype.
    """
    check_floating("x", x)
    dim = weight.shape[-1]
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"x must be [..., {dim}], got shape {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x must be on the weights' device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not casts(x.device.type):
        raise ValueError(
            f"x must have the weights' dtype {weight.dtype} outside autocast, got {x.dtype}"
        )


def casts(device_type: str) -> bool:
    """Whether autocast is on for this type of device."""
    # Autocast knows no meta tensors.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def check_count(name: str, value: int) -> None:
    """A positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
