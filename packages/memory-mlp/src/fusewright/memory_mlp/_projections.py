"""Queries, keys and values: projection, causal convolution, SiLU, normalisation."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .reference import wide

KeyNorm = Literal["l2", "rms"]
KEY_NORMS = ("l2", "rms")

# Beside the square of a key's norm or its mean square: a key of zeros stays one.
NORM_EPS = 1e-6


class Projected(NamedTuple):
    """What the memory is asked and told of T tokens.

    Attributes:
        q, k, v: ``[B, T, heads, D]``.
        finite: ``[B, T, heads]``, whether k and v are.
        history: ``[B, convolution - 1, 3 * heads * D]``, the last inputs of the convolution.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    finite: Tensor
    history: Tensor


class Projections(nn.Module):
    """Queries and keys ``normalised(SiLU(conv(x W)))``, values ``SiLU(conv(x W))``, without biases.

    Args:
        dim: width of x.
        heads, head_dim: number and width D of the heads.
        convolution: taps of the depthwise causal convolution, 0 for none.
        key_norm: "l2" divides queries and keys of every head by their norm, "rms" by their root
            mean square; None leaves them.
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
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.width = heads * head_dim
        self.key_norm = key_norm
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

    def forward(self, x: Tensor, queries: Tensor | None, history: Tensor) -> Projected:
        """Keys and values of ``x [B, T, dim]``, queries of ``queries`` or, without, of x."""
        if queries is None:
            joint = self.joint(x)
        else:
            ours, theirs = self.joint.weight.split((self.width, 2 * self.width))
            joint = torch.cat((F.linear(queries, ours), F.linear(x, theirs)), -1)
        seen = torch.cat((history.to(joint.dtype), joint), 1)
        # [B, T, 3, heads, D]
        heads = F.silu(self.convolved(seen, self.taps)).unflatten(-1, (3, self.heads, -1))
        finite = finite_rows(heads[:, :, 1:].detach()).all(2)
        normed, v = heads.split((2, 1), 2)
        q, k = self.normalised(normed).unbind(2)
        # A copy: a view would hold the memory of the whole call.
        last = seen[:, seen.shape[1] - self.reach :].to(history.dtype, copy=True)
        return Projected(q, k, v.squeeze(2), finite, last)

    def queries_of(self, queries: Tensor, before: Tensor | None) -> Tensor:
        """``[B, S, dim]`` to ``[B, S, heads, D]``; the convolution sees ``before [B, n, dim]``
        first.
        """
        seen = queries
        if before is not None:
            first = max(before.shape[1] - self.reach, 0)
            seen = torch.cat((before[:, first:], queries), 1)
        missing = self.reach - (seen.shape[1] - queries.shape[1])
        seen = F.pad(seen, (0, 0, missing, 0))
        projected = F.linear(seen, self.joint.weight[: self.width])
        taps = None if self.taps is None else self.taps[: self.width]
        return self.normalised(
            F.silu(self.convolved(projected, taps)).unflatten(-1, (self.heads, -1))
        )

    def convolved(self, x: Tensor, taps: Tensor | None) -> Tensor:
        """The depthwise convolution; x begins with what lies before the first token."""
        if taps is None:
            return x
        taps = taps.to(x.dtype)
        length = x.shape[1] - self.reach
        if x.is_cpu and length:
            # The fastest of torch's convolutions there. A card's may sum gradients in any order.
            return F.conv2d(x.mT.unsqueeze(2), taps[:, None, None], groups=len(taps)).squeeze(2).mT
        out = x[:, :length] * taps[:, 0]
        for tap in range(1, taps.shape[1]):
            out = torch.addcmul(out, x[:, tap : tap + length], taps[:, tap])
        return out

    def normalised(self, x: Tensor) -> Tensor:
        """Every head's vector divided by its norm, computed in fp32."""
        if self.key_norm is None:
            return x
        squares = wide(x).square()
        size = squares.sum(-1, True) if self.key_norm == "l2" else squares.mean(-1, True)
        return (wide(x) * torch.rsqrt(size + NORM_EPS)).to(x.dtype)


def finite_tokens(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x ``[B, T, dim]`` with zeros for tokens that are masked or not finite, and ``[B, T]`` which
    are neither.
    """
    present = finite_rows(x.detach())
    if mask is not None:
        present = present & mask
    return torch.where(present.unsqueeze(-1), x, 0.0), present


def finite_rows(x: Tensor) -> Tensor:
    """Whether the last axis is finite, and its sum too: one pass, where torch.isfinite takes
    several.
    """
    return x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()
