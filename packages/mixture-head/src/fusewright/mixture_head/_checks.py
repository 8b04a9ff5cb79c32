"""What the public functions ask of their arguments, before any memory is touched."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Scale = Literal["log_sigma", "softplus"]
SCALES = get_args(Scale)

LOG_SIGMA_RANGE = (-7.0, 5.0)
EPS = 1e-3
# Within these, finite parameters and targets give finite results and gradients in fp32.
WIDEST_LOG_SIGMA = 20.0
LOWEST_EPS = 1e-6


class ScaleForm(NamedTuple):
    """What the third parameter of a component means, as the ops take it."""

    softplus: bool
    low: float
    high: float
    eps: float


def checked_scale(scale: str, log_sigma_range: Sequence[float], eps: float) -> ScaleForm:
    if scale not in SCALES:
        raise ValueError(f'scale must be "log_sigma" or "softplus", got {scale!r}')
    if not isinstance(log_sigma_range, Sequence) or len(log_sigma_range) != 2:
        raise ValueError(f"log_sigma_range must be two numbers, got {log_sigma_range!r}")
    low, high = (
        checked_number("log_sigma_range", end, -WIDEST_LOG_SIGMA, WIDEST_LOG_SIGMA)
        for end in log_sigma_range
    )
    if low > high:
        raise ValueError(f"log_sigma_range must not fall, got {(low, high)}")
    return ScaleForm(scale == "softplus", low, high, checked_number("eps", eps, LOWEST_EPS, 1e6))


def check_params(params: torch.Tensor) -> None:
    """params must be floating and ``[..., K, 3]`` with a component."""
    check_floating("params", params)
    if params.ndim < 2 or params.shape[-1] != 3 or params.shape[-2] == 0:
        raise ValueError(
            "params must be [..., K, 3] with at least one component, "
            f"got shape {tuple(params.shape)}"
        )


def check_targets(params: torch.Tensor, y: torch.Tensor) -> None:
    """y must hold one floating number for each mixture, on params' device."""
    check_floating("y", y)
    if y.shape != params.shape[:-2]:
        raise ValueError(
            f"y must have shape {tuple(params.shape[:-2])}, one number for each mixture, "
            f"got {tuple(y.shape)}"
        )
    check_device("y", y, "params", params)


def check_points(params: torch.Tensor, y: torch.Tensor) -> None:
    """y must be floating, broadcast with the shape of the mixtures and lie on params' device."""
    check_floating("y", y)
    rows = params.shape[:-2]
    # The shorter shape counts from the right.
    pairs = zip(reversed(y.shape), reversed(rows), strict=False)
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        raise ValueError(
            f"y must broadcast with the mixtures' shape {tuple(rows)}, got {tuple(y.shape)}"
        )
    check_device("y", y, "params", params)


def checked_mask(mask: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor | None:
    """mask in y's shape; it must be boolean, broadcast to y and lie on y's device."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a boolean tensor, got {what}")
    lengths = y.shape[y.ndim - mask.ndim :]
    if mask.ndim > y.ndim or any(m not in (1, n) for m, n in zip(mask.shape, lengths, strict=True)):
        raise ValueError(
            f"mask must broadcast to y's shape {tuple(y.shape)}, got {tuple(mask.shape)}"
        )
    check_device("mask", mask, "y", y)
    return mask.expand(y.shape)


def check_heads(x: torch.Tensor, hidden_weight: torch.Tensor, output_weight: torch.Tensor) -> None:
    """``[..., d]``, ``[G * S, d]`` and ``[G, S, 3]``, floating and on one device; the first two of
    one dtype, unless autocast makes them so.
    """
    for name, tensor in (
        ("x", x),
        ("hidden_weight", hidden_weight),
        ("output_weight", output_weight),
    ):
        check_floating(name, tensor)
        check_device(name, tensor, "x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar")
    if output_weight.ndim != 3 or output_weight.shape[-1] != 3:
        raise ValueError(
            f"output_weight must be [heads, S, 3], got shape {tuple(output_weight.shape)}"
        )
    heads, stored, _ = output_weight.shape
    wanted = (heads * stored, x.shape[-1])
    if tuple(hidden_weight.shape) != wanted:
        raise ValueError(
            f"hidden_weight must have shape {wanted}, heads * S rows of x's width, "
            f"got {tuple(hidden_weight.shape)}"
        )
    if hidden_weight.dtype != x.dtype and not casts(x.device.type):
        raise ValueError(
            f"hidden_weight must have x's dtype {x.dtype} outside autocast, "
            f"got {hidden_weight.dtype}"
        )


def casts(device_type: str) -> bool:
    """Whether autocast is on for this type of device."""
    # Autocast knows no meta tensors.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} must be on {other_name}'s device {other.device}, got {tensor.device}"
        )


def checked_real(name: str, value: float) -> float:
    """``value`` as a float; it must be a real number, or NaN."""
    if isinstance(value, bool) or not isinstance(value, (float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def checked_number(name: str, value: float, lowest: float, highest: float) -> float:
    """``value`` as a float; it must be a real number from ``lowest`` to ``highest``."""
    number = checked_real(name, value)
    if not lowest <= number <= highest:
        raise ValueError(f"{name} must be from {lowest:g} to {highest:g}, got {value}")
    return number


def checked_count(name: str, value: int) -> int:
    """A positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
