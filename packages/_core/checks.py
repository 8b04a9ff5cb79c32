"""Checks of arguments that several packages make, before any memory is touched.

Each error says what was wanted and what was passed. The contents of tensors are never read.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check_floating(name: str, tensor: Tensor) -> None:
    """A strided tensor of fp32, bf16, fp16 or fp64."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    # A call less for each operand of a small kernel.
    if tensor.layout is not torch.strided or tensor.is_nested:
        check_strided(name, tensor)


def check_integers(name: str, tensor: Tensor) -> None:
    """A strided tensor of int32 or int64."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    check_strided(name, tensor)


def check_bool(name: str, tensor: Tensor) -> None:
    """A strided tensor of bool."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{name} must be a bool tensor, got {kind}")
    check_strided(name, tensor)


def check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a strided tensor, got {kind}")


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on {other_name}'s device {other.device}, got {tensor.device}"
        )


def check_dtype(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name} must have {other_name}'s dtype {other.dtype}, got {tensor.dtype}")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """A second operand must have the first one's shape, dtype and device."""
    check_floating(name, tensor)
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have {other_name}'s shape {tuple(other.shape)}, got {tuple(tensor.shape)}"
        )
    if tensor.dtype != other.dtype:
        check_dtype(name, tensor, other_name, other)
    if tensor.device != other.device:
        check_device(name, tensor, other_name, other)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """cu_seqlens [N + 1] must be integers, and q one row."""
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with N at least 1, got {cu_seqlens.shape}")
    if q.shape[0] != 1:
        raise ValueError(f"with cu_seqlens q must have one row, B = 1, got {tuple(q.shape)}")
    check_device("cu_seqlens", cu_seqlens, "q", q)


def check_mask(mask: Tensor, x: Tensor) -> None:
    """mask must be [B, T], bool, of the tokens of x."""
    check_bool("mask", mask)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must be [B, T] = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    check_device("mask", mask, "x", x)


def check_option(name: str, value: str, options: Sequence[str]) -> None:
    """``value`` must be one of the options."""
    if value not in options:
        wanted = " or ".join(f'"{option}"' for option in options)
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def checked_real(name: str, value: float) -> float:
    """``value`` as a float; it must be a real number, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def checked_number(
    name: str, value: float, lowest: float = -math.inf, highest: float = math.inf
) -> float:
    """``value`` as a float; it must be a finite real number from ``lowest`` to ``highest``."""
    number = checked_real(name, value)
    # Comparisons alone: torch.compile traces them for a number that it holds as a symbol.
    if not (-math.inf < number < math.inf and lowest <= number <= highest):
        ends = f"from {lowest:.3g} to {highest:.3g}"
        if highest == math.inf:
            ends = "a finite number" if lowest == -math.inf else f"a finite number >= {lowest:g}"
        raise ValueError(f"{name} must be {ends}, got {value}")
    return number


def checked_count(name: str, value: int, lowest: int = 1) -> int:
    """``value`` as an int; it must be a whole number of at least ``lowest``."""
    # torch.compile traces a number that varies as a SymInt, which is no Integral.
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value}")
    return value if isinstance(value, torch.SymInt) else int(value)
