"""The joint projection to queries, keys and values, and the taps of the convolution after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.backends import Backend
from .._core.typed import called_as
from .memory_input import memory_queries

KeyNorm = Literal["l2", "rms"]
KEY_NORMS = ("l2", "rms")


class Projections(nn.Module):
    """Queries and keys ``normalised(SiLU(conv(x W)))``, values ``SiLU(conv(x W))``, without biases:
    x W is computed here, the rest by ``memory_input``.

    Args:
        dim: width of x.
        heads, head_dim: number and width D of the heads.
        convolution: taps of the depthwise causal convolution, 0 for none.
        key_norm: "l2" divides queries and keys of every head by their norm, "rms" by their root
            mean square; None leaves them.
        backend: of ``queries_of``.
        device, dtype: of the weights.

    Attributes:
        joint: ``nn.Linear(dim, 3 * heads * D, bias=False)``, queries above keys above values.
        taps: ``[3 * heads * D, convolution]``, the last one for the token itself; None without.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        convolution: int,
        key_norm: KeyNorm | None,
        backend: Backend,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Take the arguments that the class names."""
        super().__init__()
        self.heads = heads
        self.width: int = heads * head_dim
        self.key_norm = key_norm
        self.backend: Backend = backend
        self.joint: nn.Linear = nn.Linear(
            dim, 3 * self.width, bias=False, device=device, dtype=dtype
        )
        self.taps: nn.Parameter | None = None
        if convolution:
            taps = torch.empty(3 * self.width, convolution, device=device, dtype=dtype)
            self.taps = nn.Parameter(taps)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights, uniform by fan-in as nn.Linear and nn.Conv1d do."""
        self.joint.reset_parameters()
        if self.taps is not None:
            bound = self.taps.shape[1] ** -0.5
            nn.init.uniform_(self.taps, -bound, bound)

    @property
    def reach(self) -> int:
        """How many earlier tokens the convolution sees."""
        return 0 if self.taps is None else self.taps.shape[1] - 1

    def forward(self, x: Tensor, queries: Tensor | None) -> Tensor:
        """``[B, T, 3 * heads * D]``: keys and values of ``x [B, T, dim]``, queries of ``queries``
        or, without, of x.
        """
        if queries is None:
            return self.joint(x)
        for_queries, for_writes = self.joint.weight.split((self.width, 2 * self.width))
        return torch.cat((F.linear(queries, for_queries), F.linear(x, for_writes)), -1)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def queries_of(self, queries: Tensor, before: Tensor | None) -> Tensor:
        """``[B, S, dim]`` to ``[B, S, heads, D]``; the convolution sees ``before [B, n, dim]``
        first.
        """
        seen = queries
        if before is not None:
            first = max(before.shape[1] - self.reach, 0)
            seen = torch.cat((before[:, first:], queries), 1)
        missing = self.reach - (seen.shape[1] - queries.shape[1])
        if missing:
            seen = F.pad(seen, (0, 0, missing, 0))
        projected = F.linear(seen, self.joint.weight[: self.width])
        history, joint = projected.split((self.reach, queries.shape[1]), 1)
        return memory_queries(
            joint,
            history,
            None if self.taps is None else self.taps[: self.width],
            heads=self.heads,
            key_norm=self.key_norm,
            backend=self.backend,
        )
