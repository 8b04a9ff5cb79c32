"""The gated feed-forward layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .._core.backends import Backend, check_backend
from .._core.checks import check_device, check_floating, checked_count
from .._core.padding import (
    Padded,
    clear_padding_of,
    keep_padding_out,
    padded_width,
    padding_of,
)
from .._core.precision import autocasts
from ..gating.silu_mul import silu_mul_halves


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
        backend: "auto", "triton" or "reference": what serves the gating, as in :func:`silu_mul`.
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
        """``x [..., d]`` to the same shape; in the autocast dtype under autocast, as nn.Linear.

        Raises:
            TypeError: x is not floating point or not strided.
            ValueError: x's last axis is not d, or x differs from the weights in device or, outside
                autocast, in dtype.
            RuntimeError: the backend is "triton" and the kernels cannot serve this call.
        """
        check_rows(x, self.joint.weight)
        return self.output(silu_mul_halves(self.joint(x), backend=self.backend))

    def extra_repr(self) -> str:
        return (
            f"{self.joint.in_features}, {self.hidden_width}, "
            f"stored_width={self.output.in_features}, backend={self.backend!r}"
        )


def check_rows(x: Tensor, weight: Tensor) -> None:
    """x must hold rows that ``weight [..., d]`` can multiply, on its device and, unless autocast
    makes them so, in its dtype.
    """
    check_floating("x", x)
    dim = weight.shape[-1]
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"x must be [..., {dim}], got shape {tuple(x.shape)}")
    check_device("x", x, "weight", weight)
    if x.dtype != weight.dtype and not autocasts(x.device.type):
        raise ValueError(
            f"x must have weight's dtype {weight.dtype} outside autocast, got {x.dtype}"
        )
