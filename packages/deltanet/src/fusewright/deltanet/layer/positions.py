"""Positions of tokens in their sequences, and rotary positions, in plain torch."""

from __future__ import annotations

import torch

from .._core.precision import wide

Tensor = torch.Tensor


def rotary(x: Tensor, place: Tensor, theta: float) -> Tensor:
    """Rotary positions: columns i and i + D / 2 of x [B, T, H, D] rotate by the angle
    place * theta^(-2i / D).
    """
    half = x.shape[-1] // 2
    rates = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = place[:, None].float() * theta**-rates
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = wide(x).split(half, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.to(x.dtype)


def place_in_sequence(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """``[T]``: how many tokens of its own sequence stand before each token."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    # As for the rule: no check has read whether they are in order.
    bounds = cu_seqlens.clamp(0, tokens).cummax(0).values
    sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    # Tokens behind the last sequence belong to none.
    return token - bounds[sequence.clamp(max=bounds.numel() - 2)]
