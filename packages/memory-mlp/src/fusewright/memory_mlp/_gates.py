"""The gates of every token and head."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._backends import without_autocast
from .reference import wide

ALPHA_START = 0.01
ETA_START = 0.9
# Of max_theta, where a chunk is one token.
THETA_START = 0.25


class Gates(nn.Module):
    """alpha, eta = sigmoid of a linear layer; theta = max_theta * sigmoid, or a constant.

    All tokens start with alpha = 0.01, eta = 0.9 and theta = max_theta / (4 * chunk), for the
    weights start at zero. Computed in fp32, under autocast too (in fp64 for an fp64 x).

    Args:
        dim: width of x.
        heads: number of heads.
        theta: "learned", or the constant.
        max_theta: what theta stays below.
        chunk: tokens whose gradients are taken at the same weights.
        device, dtype: of the weights.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        theta: Literal["learned"] | float,
        max_theta: float,
        chunk: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.constant_theta = None if theta == "learned" else float(theta)
        self.max_theta = max_theta
        self.starts = [ALPHA_START, ETA_START]
        if self.constant_theta is None:
            self.starts.append(THETA_START / chunk)
        self.linear: nn.Linear = nn.Linear(
            dim, len(self.starts) * heads, device=device, dtype=dtype
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The gates' starting values, whatever x is."""
        nn.init.zeros_(self.linear.weight)
        for bias, start in zip(self.linear.bias.view(-1, self.heads), self.starts, strict=True):
            bias.fill_(math.log(start / (1.0 - start)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x [B, T, dim]`` to alpha, eta and theta ``[B, T, heads]``."""
        with without_autocast(x.device):
            x = wide(x)
            weight, bias = (p.to(x.dtype) for p in (self.linear.weight, self.linear.bias))
            gates = torch.sigmoid(F.linear(x, weight, bias)).unflatten(-1, (-1, self.heads))
            if self.constant_theta is None:
                alpha, eta, theta = gates.unbind(-2)
                return alpha, eta, self.max_theta * theta
            alpha, eta = gates.unbind(-2)
            return alpha, eta, torch.full_like(alpha, self.constant_theta)
