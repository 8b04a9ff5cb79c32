"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "relu", "gelu")
REDUCTIONS = ("sum", "mean_feature", "mean_all")


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


def check_option(name: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")


def dtype_of_state(k: torch.Tensor) -> torch.dtype:
    """What the memories that these keys are for are in."""
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def casts(device_type: str) -> bool:
    """Whether autocast is on for this type of device."""
    # Autocast knows no meta tensors.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as autocast hands them to a matrix product."""
    x = tensors[0]
    if x.dtype == torch.float64 or not casts(x.device.type):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(x.device.type)) for x in tensors)
