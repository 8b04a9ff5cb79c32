"""Checks of the tensors of mixture functions, before any memory is touched."""

from __future__ import annotations

import torch

from .._core.checks import check_device, check_floating


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
    """y must be floating, broadcast with the shape of the mixtures and be on params' device."""
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
    """mask in y's shape; it must be boolean, broadcast to y and be on y's device."""
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
