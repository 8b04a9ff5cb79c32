"""The gates of every token and head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.precision import wide, without_autocast
from .._core.typed import called_as
from .reference import gates_of


class Gates(nn.Module):
    """alpha, eta, rate = sigmoid of a linear layer; theta = max_step (1 - eta) / chunk rate, or a
    constant.

    Momentum adds a gradient up to 1 / (1 - eta) times, and a chunk's tokens do not see one another:
    all that they write for one key stays below max_step. (A step that pools more tokens than a
    chunk scales theta down.) All tokens start with the same gates, for the weights start at zero.
    Computed in fp32, under autocast too (in fp64 for an fp64 x).

    Args:
        dim: width of x.
        heads: number of heads.
        theta: "learned", or the constant.
        max_step: what chunk * theta / (1 - eta) stays below.
        chunk: tokens whose gradients are taken at the same weights.
        starts: of alpha, eta and rate.
        device, dtype: of the weights.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        theta: Literal["learned"] | float,
        max_step: float,
        chunk: int,
        starts: tuple[float, float, float],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.heads = heads
        self.constant_theta: float | None = None if theta == "learned" else float(theta)
        self.largest: float = max_step / chunk
        # A constant theta is no gate.
        self.starts: tuple[float, ...] = starts if self.constant_theta is None else starts[:2]
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
        return gates_of(self.logits(x), self.heads, self.largest, self.constant_theta)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def logits(self, x: Tensor) -> Tensor:
        """``[B, T, n * heads]``, of alpha above eta above rate, if that is learned."""
        with without_autocast(x.device):
            x = wide(x)
            return F.linear(x, *(p.to(x.dtype) for p in (self.linear.weight, self.linear.bias)))
