"""Checks of GatedDeltaNet's arguments, before any memory is touched."""

from __future__ import annotations

import math

import torch

from .._core.checks import check_floating, check_mask, checked_count

Tensor = torch.Tensor


def check_sizes(sizes: dict[str, int], expand_v: float, rope_theta: float | None) -> None:
    """Sizes of the layer, by the names of its arguments."""
    for name, size in sizes.items():
        checked_count(name, size)
    width, heads, value_heads = (sizes[x] for x in ("head_dim", "num_heads", "num_v_heads"))
    columns = width * expand_v
    if not math.isclose(round(columns), columns, rel_tol=1e-5) or columns < 1:
        raise ValueError(
            f"expand_v * head_dim must be a whole number, at least 1, got {expand_v} * {width}"
        )
    if value_heads % heads:
        raise ValueError(f"num_v_heads must be a multiple of num_heads {heads}, got {value_heads}")
    if rope_theta is not None and width % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {width}")


def check_tokens(x: Tensor, mask: Tensor | None, hidden_size: int) -> None:
    """x [B, T, hidden_size], mask [B, T]."""
    check_floating("x", x)
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must be [B, T, {hidden_size}], got {tuple(x.shape)}")
    if mask is not None:
        check_mask(mask, x)
