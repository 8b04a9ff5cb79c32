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


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as autocast hands them to a matrix product."""
    x = tensors[0]
    # Autocast knows no meta tensors.
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(x.device.type)) for x in tensors)
