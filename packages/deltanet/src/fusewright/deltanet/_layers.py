"""The small layers of Gated DeltaNet, under FLA's names of parameters."""

from __future__ import annotations

import torch
from torch import nn

from ._backends import Backend
from ._gated_norm import gated_norm
from ._short_convolution import short_convolution

Tensor = torch.Tensor


class ShortConvolution(nn.Conv1d):
    """A causal convolution of every channel by itself, then SiLU, over [B, T, channels]; with
    ``heads`` every head's columns of length 1.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        bias: bool = False,
        heads: int = 0,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            *(channels, channels, kernel_size),
            groups=channels,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.heads, self.backend = heads, backend

    def forward(
        self, x: Tensor, history: Tensor | None = None, place: Tensor | None = None
    ) -> Tensor:
        """In x's dtype, computed in fp32."""
        return short_convolution(
            x,
            self.weight.squeeze(1),
            self.bias,
            place=place,
            heads=self.heads,
            history=history,
            backend=self.backend,
        )

    def next_history(self, x: Tensor, history: Tensor) -> Tensor:
        """What of x and of what came before it the tokens that follow see."""
        return torch.cat((history.to(x.dtype), x), 1)[:, x.shape[1] :]


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm(o) weight silu(gate), over the last axis; without a gate the norm alone."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps, device=device, dtype=dtype)
        self.backend = backend

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        assert self.eps is not None
        return gated_norm(o, self.weight, gate, self.eps, backend=self.backend)
