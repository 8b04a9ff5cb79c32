"""Residual streams that are mixed around each layer, and stay bounded at any depth.

With v the n streams x_1 ... x_n of a token, one after the other, and rms(v) their root mean square,

    s = alpha (Phi v) / rms(v) + b                  n numbers, n more, and n x n
    pre = sigma(s_pre)    post = 2 sigma(s_post)    res = sinkhorn_knopp(s_res)
    u = sum_i pre_i x_i
    x'_i = sum_j res_ij x_j + post_i layer(u)

A doubly stochastic res makes of each stream a mean of all, and loses nothing of their sum: its
columns sum to one to rounding, its rows as nearly as the iterations have converged. Phi starts at 0
and b so that res is nearly the identity: streams that are mixed evenly are one and the same after a
few layers. Each layer starts with one stream that it reads and writes more than the others.

Reading and writing are `fusewright.hyper_connections`, the doubly stochastic matrix is
`fusewright.norm`'s.

Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, eq. 14-19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fusewright.hyper_connections import stream_coefficients, stream_read, stream_write
from fusewright.norm import Backend, sinkhorn_knopp
from torch import Tensor, nn

from ..._core.typed import called_as

# Streams that can be mixed.
MOST = 64
START_ALPHA = 0.01
# Of logits: what a stream has of another at the start, and how much a layer makes of its own.
OFF_DIAGONAL = -8.0
OTHERS, OWN = -1.0, 1.0


class Reading(NamedTuple):
    """What a layer reads of streams, and what it takes to write to them.

    Attributes:
        u: ``[..., C]``, in autocast's dtype where that is on, else in the streams'.
        post, res: ``[..., n]`` and ``[..., n, n]``.
        mixed, origin: the streams ``[..., n, C]``, once for what mixes them and once for what is
            taken from them: the gradients of both are added in the backward pass of the reading.
    """

    u: Tensor
    post: Tensor
    res: Tensor
    mixed: Tensor
    origin: Tensor


class StreamMixer(nn.Module):
    """What a layer reads of the streams, and how they are mixed with what it writes.

    Args:
        streams: n, from 1 to 64; the kernels of reading and writing serve up to 8.
        dim: C, the width of a stream.
        place: of the layer among all; it decides which stream the layer starts with.
        iterations: of ``sinkhorn_knopp``.
        backend: "auto" takes the kernels for CUDA tensors and plain torch for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Parameters are fp32; mixing is done in fp32, under autocast too.

    Raises:
        ValueError: n is not from 1 to 64.
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
        if not 1 <= streams <= MOST:
            raise ValueError(f"streams must be from 1 to {MOST}; got {streams}")
        self.iterations, self.backend = iterations, backend
        self.phi = nn.Parameter(torch.zeros(streams * (streams + 2), streams * dim))
        self.alpha = nn.Parameter(torch.full((3,), START_ALPHA))
        own = torch.full((streams,), OTHERS)
        own[place % streams] = OWN
        diagonal = torch.full((streams, streams), OFF_DIAGONAL).fill_diagonal_(0.0)
        self.bias = nn.Parameter(torch.cat([own, own, diagonal.flatten()]))

    def forward(
        self, x: Tensor, layer: Callable[[Tensor], tuple[Tensor, Any]]
    ) -> tuple[Tensor, Any]:
        """The streams after a layer, and what else the layer returns.

        Args:
            x: ``[..., n, C]``.
            layer: from ``[..., C]`` to the same, and whatever it has to say besides.
        """
        reading = self.read(x)
        y, besides = layer(reading.u)
        return self.write(reading, y), besides

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def read(self, x: Tensor) -> Reading:
        """What a layer reads of streams ``[..., n, C]``."""
        u, post, logits, *streams = stream_read(
            x, self.phi, self.alpha, self.bias, backend=self.backend
        )
        return Reading(u, post, self._mixing(logits), *streams)

    def write(self, reading: Reading, y: Tensor, *, origin: Tensor | None = None) -> Tensor:
        """The streams after a layer has written ``y [..., C]`` to those that were read, less
        ``origin``.
        """
        of_streams = reading.mixed, reading.res, reading.post
        return stream_write(*of_streams, y, origin=origin, backend=self.backend)

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre and post, ``[..., n]``, and res, ``[..., n, n]``, of streams ``[..., n, C]``, in
        plain torch.
        """
        pre, post, logits = stream_coefficients(x, self.phi, self.alpha, self.bias)
        return pre, post, self._mixing(logits)

    def _mixing(self, logits: Tensor) -> Tensor:
        # In the linear domain great logits give columns of zeros: their streams would be lost.
        options: dict[str, Any] = dict(iterations=self.iterations, domain="log")
        return sinkhorn_knopp(logits, **options, backend=self.backend)


def replicated(x: Tensor, streams: int) -> Tensor:
    """``[..., n, C]``: x in every stream, so that it keeps its weight in their mean."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1])
