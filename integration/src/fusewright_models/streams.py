"""Residual streams that are mixed around each layer, and stay bounded at any depth.

With v the n streams x_1 ... x_n of a token, one after the other, and rms(v) their root mean square,

    s = alpha (Phi v) / rms(v) + b                  n numbers, n more, and n x n
    pre = sigma(s_pre)    post = 2 sigma(s_post)    res = sinkhorn_knopp(s_res)
    u = sum_i pre_i x_i
    x'_i = sum_j res_ij x_j + post_i layer(u)

A doubly stochastic res makes of each stream a mean of all, and loses nothing of their sum. Phi
starts at 0 and b so that res is nearly the identity: streams that are mixed evenly are one and the
same after a few layers. Each layer starts with one stream that it reads and writes more than the
others.

Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, eq. 14-19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fusewright.norm import Backend, sinkhorn_knopp
from torch import Tensor, nn
from torch.nn import functional as F

from .fixed_point import wide

EPS = 1e-6
START_ALPHA = 0.01
# Of logits: what a stream has of another at the start, and how much a layer makes of its own.
OFF_DIAGONAL = -8.0
OTHERS, OWN = -1.0, 1.0


class StreamMixer(nn.Module):
    """What a layer reads of the streams, and how they are mixed with what it writes.

    Args:
        streams: n, from 1 to 64.
        dim: C, the width of a stream.
        place: of the layer among all; it decides which stream the layer starts with.
        iterations: of ``sinkhorn_knopp``.
        backend: of ``sinkhorn_knopp``.

    Parameters are fp32; mixing is done in fp32, under autocast too.
    """

    def __init__(
        self,
        streams: int,
        dim: int,
        *,
        place: int = 0,
        iterations: int = 20,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.streams, self.iterations, self.backend = streams, iterations, backend
        self.parts = [streams, streams, streams * streams]
        self.phi = nn.Parameter(torch.zeros(sum(self.parts), streams * dim))
        self.alpha = nn.Parameter(torch.full((3,), START_ALPHA))
        own = torch.full((streams,), OTHERS)
        own[place % streams] = OWN
        diagonal = torch.full((streams, streams), OFF_DIAGONAL).fill_diagonal_(0.0)
        self.bias = nn.Parameter(torch.cat([own, own, diagonal.flatten()]))

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre and post, ``[..., n]``, and res, ``[..., n, n]``, of streams ``[..., n, C]``."""
        v = x.flatten(-2)
        of_parts = zip(self.alpha, F.linear(v, self.phi).split(self.parts, -1), strict=True)
        s = torch.cat([alpha * part for alpha, part in of_parts], -1)
        s = s * (v.square().mean(-1, keepdim=True) + EPS).rsqrt() + self.bias
        pre, post, res = s.split(self.parts, -1)
        res = res.unflatten(-1, (self.streams, self.streams))
        mixed = sinkhorn_knopp(res, iterations=self.iterations, backend=self.backend)
        return pre.sigmoid(), 2.0 * post.sigmoid(), mixed

    def forward(
        self, x: Tensor, layer: Callable[[Tensor], tuple[Tensor, Any]]
    ) -> tuple[Tensor, Any]:
        """The streams after a layer, and what else the layer returns.

        Args:
            x: ``[..., n, C]``.
            layer: from ``[..., C]`` to the same, and whatever it has to say besides.
        """
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(wide(x.dtype))
            pre, post, res = self.coefficients(x)
            u = (pre.unsqueeze(-2) @ x).squeeze(-2)
        y, besides = layer(u)
        with torch.autocast(x.device.type, enabled=False):
            y = y.to(x.dtype)
            return res @ x + post.unsqueeze(-1) * y.unsqueeze(-2), besides


def replicated(x: Tensor, streams: int) -> Tensor:
    """``[..., n, C]``: x in every stream, so that it keeps its weight in their mean."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1])
