"""The feed-forward layer with its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._core.backends import Backend, check_backend
from .._core.checks import checked_count
from .._core.padding import (
    Padded,
    clear_padding_of,
    keep_padding_out,
    padded_width,
    padding_of,
)
from .feed_forward import feed_forward


class FeedForward(nn.Module):
    """SiLU(x A^T) C^T, without biases.

    Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, arXiv 1702.03118.

    A state dict holds ``[F, d]`` and ``[d, F]``, copies without the padding; one with it loads
    too, if it is zero. Of another F it is a size mismatch. States of optimizers have the stored
    shapes, and so have sharded weights (DTensors), in a state dict too.

    Args:
        dim: d, width of input and output.
        hidden_width: F, width of the hidden layer, any number. It is stored as S, F rounded up to a
            multiple of 32. Weights beyond F are zero, get gradients of exactly zero, and stay zero
            under training.
        backend: "auto", "triton" or "reference", as in :func:`feed_forward`.
        device, dtype: of the weights.

    Attributes:
        hidden: ``nn.Linear(d, S, bias=False)``, A.
        output: ``nn.Linear(S, d, bias=False)``, C.

    Example:
        >>> layer = FeedForward(512, 1365)
        >>> y = layer(x)                                  # [..., 512] to [..., 512]
    """

    def __init__(
        self,
        dim: int,
        hidden_width: int,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dim = checked_count("dim", dim)
        hidden_width = checked_count("hidden_width", hidden_width)
        check_backend(backend)
        super().__init__()
        self.hidden_width = hidden_width
        self.backend: Backend = backend
        stored = padded_width(hidden_width)
        options: dict[str, Any] = dict(bias=False, device=device, dtype=dtype)
        self.hidden: nn.Linear = nn.Linear(dim, stored, **options)
        self.output: nn.Linear = nn.Linear(stored, dim, **options)
        sizes: dict[str, int] = dict(blocks=1, width=hidden_width, stored=stored)
        self.padded: dict[str, Padded] = {
            "hidden.weight": Padded(axis=0, **sizes),
            "output.weight": Padded(axis=1, **sizes),
        }
        keep_padding_out(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, uniform by fan-in as nn.Linear of the widths d and F would; zeros
        beyond F.
        """
        for weight, fan_in in (
            (self.hidden.weight, self.hidden.in_features),
            (self.output.weight, self.hidden_width),
        ):
            bound = 1.0 / math.sqrt(fan_in)
            nn.init.uniform_(weight, -bound, bound)
        self.clear_padding()

    def clear_padding(self) -> None:
        """Set the stored weights beyond F to zero."""
        clear_padding_of(self)

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        return padding_of(self)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., d]`` to the same shape, as :func:`feed_forward`, which says what it raises."""
        return feed_forward(x, self.hidden.weight, self.output.weight, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden.in_features}, {self.hidden_width}, "
            f"stored_width={self.output.in_features}, backend={self.backend!r}"
        )
