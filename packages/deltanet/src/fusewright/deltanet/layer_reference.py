"""The small operations of Gated DeltaNet in plain torch: the specification, the yardstick of the
tests and the CPU implementation. Everything is computed in fp32 (in fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .reference import wide

Tensor = torch.Tensor

# Beside the square of a row's length.
L2_EPS = 1e-6


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    place: Tensor | None,
    heads: int,
    history: Tensor | None = None,
) -> Tensor:
    """silu(conv(x)) over [B, T, channels], every channel by itself with the taps of its row of
    weight [channels, taps], the last one for the token itself; with ``heads`` every head's columns
    of length 1. What stands before a sequence's first token is ``history``, or zero.
    """
    taps, tokens = weight.shape[1], x.shape[1]
    if history is None:
        history = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    whole = torch.cat((history.to(x.dtype), x), 1)
    weight = wide(weight)
    total = weight.new_zeros(()) if bias is None else wide(bias)
    for tap in range(taps):
        seen = wide(whole[:, tap : tap + tokens])
        if place is not None:
            seen = seen.masked_fill((place < taps - 1 - tap).unsqueeze(-1), 0.0)
        total = total + seen * weight[:, tap]
    y = F.silu(total)
    if heads:
        y = unit_length(y.unflatten(-1, (heads, -1))).flatten(-2)
    return y.to(x.dtype)


def unit_length(x: Tensor) -> Tensor:
    """x / |x| over the last axis."""
    rows = wide(x)
    return (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> tuple[Tensor, ...]:
    """Gradients of x, weight and, where there is one, of the bias."""
    present = (x, weight) if bias is None else (x, weight, bias)

    def forward(x, weight, bias=None):
        return short_convolution(x, weight, bias, place, heads)

    return torch.func.vjp(forward, *present)[1](dy)


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    """o / sqrt(mean(o^2) + eps) weight silu(gate), over the last axis, in o's dtype."""
    normed = F.rms_norm(wide(o), o.shape[-1:], None, eps) * weight
    if gate is not None:
        normed = normed * F.silu(wide(gate))
    return normed.to(o.dtype)


def gated_norm_backward(
    dy: Tensor, o: Tensor, weight: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Gradients of o, weight and, where there is one, of the gate."""
    present = (o, weight) if gate is None else (o, weight, gate)

    def forward(o, weight, gate=None):
        return gated_norm(o, weight, gate, eps)

    return torch.func.vjp(forward, *present)[1](dy)


def rotated(x: Tensor, place: Tensor, theta: float) -> Tensor:
    """Rotary positions: columns i and i + D / 2 of [B, T, H, D] turn by place * theta^(-2i / D)."""
    half = x.shape[-1] // 2
    rates = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = place[:, None].float() * theta**-rates
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = wide(x).split(half, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


def place_in_sequence(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """``[T]``: how many tokens of its own sequence stand before each token."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    # As for the rule: nobody has read whether they are in order.
    bounds = cu_seqlens.clamp(0, tokens).cummax(0).values
    sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    # Tokens behind the last sequence belong to none.
    return token - bounds[sequence.clamp(max=bounds.numel() - 2)]
