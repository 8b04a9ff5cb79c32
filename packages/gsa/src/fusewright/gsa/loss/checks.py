"""What indexer_kl_loss checks of its arguments, before any memory is touched."""

from __future__ import annotations

import torch

from .._core.checks import check_device, check_floating, checked_number
from ..common.checks import HIGHEST_SCALE

Tensor = torch.Tensor


def check_loss(
    q_index: Tensor, k_index: Tensor, q: Tensor, k: Tensor, lse: Tensor, indices: Tensor | None
) -> None:
    """The indexer and the attention must be of the same tokens, lse [B, H, T], and indices of all
    heads.
    """
    for name, x, other_name, other in (
        ("q", q, "q_index", q_index),
        ("k", k, "k_index", k_index),
    ):
        if x.shape[:2] != other.shape[:2]:
            raise ValueError(
                f"{name} must have the tokens of {other_name}, {tuple(other.shape[:2])}, "
                f"got {tuple(x.shape[:2])}"
            )
        check_device(name, x, "q_index", q_index)
    check_floating("lse", lse)
    wanted = (q.shape[0], q.shape[2], q.shape[1])
    if tuple(lse.shape) != wanted:
        raise ValueError(f"lse must have shape {wanted}, got {tuple(lse.shape)}")
    check_device("lse", lse, "q_index", q_index)
    if indices is not None and isinstance(indices, Tensor) and indices.ndim != 3:
        raise ValueError(f"indices must be [batch, tokens, K], got {tuple(indices.shape)}")


def checked_temperature(temperature: Tensor | float, q_index: Tensor) -> Tensor:
    """The temperature as a tensor of one number, on the indexer's device."""
    if isinstance(temperature, Tensor):
        check_floating("temperature", temperature)
        if temperature.ndim:
            raise ValueError(
                f"temperature must be one number, got shape {tuple(temperature.shape)}"
            )
        check_device("temperature", temperature, "q_index", q_index)
        return temperature
    number = checked_number("temperature", temperature, -HIGHEST_SCALE, HIGHEST_SCALE)
    wide = torch.promote_types(q_index.dtype, torch.float32)
    return torch.full((), number, dtype=wide, device=q_index.device)
