"""The short convolution in plain torch: the specification, the yardstick of the tests and the CPU
implementation. Everything is computed in fp32 (in fp64 for fp64 inputs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.precision import wide
from ..common.gradients import gradients
from ..common.unit_length import unit_length

Tensor = torch.Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    place: Tensor | None,
    heads: int,
    history: Tensor | None = None,
) -> Tensor:
    """silu(conv(x)) over [B, T, channels]: each channel is convolved with the taps of its row of
    weight [channels, taps], the last one for the token itself; with ``heads`` the columns of each
    head then get length 1. Before a sequence's first token stands ``history``, or zero.
    """
    taps, tokens = weight.shape[1], x.shape[1]
    if history is None:
        history = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    padded = torch.cat((history.to(x.dtype), x), 1)
    weight = wide(weight)
    z = weight.new_zeros(()) if bias is None else wide(bias)
    for tap in range(taps):
        shifted = wide(padded[:, tap : tap + tokens])
        if place is not None:
            shifted = shifted.masked_fill((place < taps - 1 - tap).unsqueeze(-1), 0.0)
        z = z + shifted * weight[:, tap]
    y = F.silu(z)
    if heads:
        y = unit_length(y.unflatten(-1, (heads, -1))).flatten(-2)
    return y.to(x.dtype)


def short_convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor | None, heads: int
) -> tuple[Tensor, ...]:
    """Gradients of x, weight and bias."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (short_convolution(x, weight, bias, place, heads),)

    return gradients(forward, (x, weight, bias), (dy,), like=weight)
