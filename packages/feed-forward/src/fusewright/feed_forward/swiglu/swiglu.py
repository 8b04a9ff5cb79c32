"""The gated feed-forward layer."""

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
from .gated_feed_forward import gated_feed_forward


class SwiGLU(nn.Module):
    """(SiLU(x A^T) * x B^T) C^T, without biases; x A^T and x B^T are one product.

    Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.

    A state dict holds ``[2 F, d]`` and ``[d, F]``, copies without the padding; one with it loads
    too, if it is zero. Of another F it is a size mismatch. States of optimizers have the stored
    shapes, and so have sharded weights (DTensors), in a state dict too.

    Args:
        dim: d, width of input and output.
        hidden_width: F, width of the gated hidden layer, any number. It is stored as S, F rounded
            up to a multiple of 32. Weights beyond F are zero, get gradients of exactly zero, and
            stay zero under training.
        backend: "auto", "triton" or "reference": as in :func:`gated_feed_forward`.
        device, dtype: of the weights.

    Attributes:
        joint: ``nn.Linear(d, 2 * S, bias=False)``, A above B.
        output: ``nn.Linear(S, d, bias=False)``, C.

    Example:
        >>> layer = SwiGLU(512, 1365)
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
        self.joint: nn.Linear = nn.Linear(dim, 2 * stored, **options)
        self.output: nn.Linear = nn.Linear(stored, dim, **options)
        self.padded: dict[str, Padded] = {
            "joint.weight": Padded(axis=0, blocks=2, width=hidden_width, stored=stored),
            "output.weight": Padded(axis=1, blocks=1, width=hidden_width, stored=stored),
        }
        keep_padding_out(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, uniform by fan-in as nn.Linear of the widths d and F would; zeros
        beyond F.
        """
        bound = 1.0 / math.sqrt(self.joint.in_features)
        nn.init.uniform_(self.joint.weight, -bound, bound)
        bound = 1.0 / math.sqrt(self.hidden_width)
        nn.init.uniform_(self.output.weight, -bound, bound)
        self.clear_padding()

    def clear_padding(self) -> None:
        """Set the stored weights beyond F to zero."""
        clear_padding_of(self)

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        return padding_of(self)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., d]`` to the same shape, as :func:`gated_feed_forward`, which says what it
        raises.
        """
        return gated_feed_forward(x, self.joint.weight, self.output.weight, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"{self.joint.in_features}, {self.hidden_width}, "
            f"stored_width={self.output.in_features}, backend={self.backend!r}"
        )
