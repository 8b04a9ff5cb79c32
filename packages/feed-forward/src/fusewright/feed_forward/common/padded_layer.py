"""The weights of a feed-forward layer, whose hidden width is stored padded."""

from __future__ import annotations

import math
from typing import Any, ClassVar

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


class PaddedLayer(nn.Module):
    """Two products without biases: of x, by the module named ``first``, with the hidden width
    ``blocks`` times, and of the hidden layer, by ``output``.
    """

    first: ClassVar[str]
    blocks: ClassVar[int]
    output: nn.Linear

    def __init__(
        self,
        dim: int,
        hidden_width: int,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments that the class names."""
        dim = checked_count("dim", dim)
        hidden_width = checked_count("hidden_width", hidden_width)
        check_backend(backend)
        super().__init__()
        self.hidden_width = hidden_width
        self.backend: Backend = backend
        stored = padded_width(hidden_width)
        options: dict[str, Any] = dict(bias=False, device=device, dtype=dtype)
        self.add_module(self.first, nn.Linear(dim, self.blocks * stored, **options))
        self.output = nn.Linear(stored, dim, **options)
        sizes: dict[str, int] = dict(width=hidden_width, stored=stored)
        self.padded: dict[str, Padded] = {
            f"{self.first}.weight": Padded(axis=0, blocks=self.blocks, **sizes),
            "output.weight": Padded(axis=1, blocks=1, **sizes),
        }
        keep_padding_out(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, uniform by fan-in as nn.Linear of the widths d and F would; zeros
        beyond F.
        """
        first = self.get_parameter(f"{self.first}.weight")
        fans_in = (first, self.output.out_features), (self.output.weight, self.hidden_width)
        for weight, fan_in in fans_in:
            bound = 1.0 / math.sqrt(fan_in)
            nn.init.uniform_(weight, -bound, bound)
        self.clear_padding()

    def clear_padding(self) -> None:
        """Set the stored weights beyond F to zero."""
        clear_padding_of(self)

    def padding(self) -> list[Tensor]:
        """Views of the stored weights that are not part of the model."""
        return padding_of(self)

    def extra_repr(self) -> str:
        """Say the module's options, for ``print``."""
        return (
            f"{self.output.out_features}, {self.hidden_width}, "
            f"stored_width={self.output.in_features}, backend={self.backend!r}"
        )
