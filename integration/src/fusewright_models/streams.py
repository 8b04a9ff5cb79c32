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

On a card a reading is a launch that takes its dot products and its mean square in one pass over the
streams, another for sinkhorn_knopp, and a writing one launch. The products of Phi are TF32 in three
parts, which is as near as fp32. Kept for the backward pass, beside what goes in: s before alpha and
b, and 1 / rms(v).

Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, eq. 14-19.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fusewright.norm import Backend, available_backends, sinkhorn_knopp
from torch import Tensor, nn
from torch.nn import functional as F

from . import _stream_ops as kernels
from .devices import autocast_dtype
from .fixed_point import wide
from .transformer_np_layers import without_autocast

EPS = 1e-6
# Streams that can be mixed.
MOST = 64
# Streams that the kernels are made for.
WIDEST = 8
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
        streams: n, from 1 to 64; the kernels of this module serve up to 8.
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
        self.streams, self.iterations, self.backend = streams, iterations, backend
        self.parts = [streams, streams, streams * streams]
        self.phi = nn.Parameter(torch.zeros(sum(self.parts), streams * dim))
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

    def read(self, x: Tensor) -> Reading:
        """What a layer reads of streams ``[..., n, C]``."""
        x = x.to(wide(x.dtype))
        dtype = autocast_dtype(x.device) or x.dtype
        with without_autocast(x.device):
            if self._kernels_serve(x):
                u, post, logits, *streams = kernels.read(x, self.phi, self.alpha, self.bias, dtype)
                return Reading(u, post, self._mixing(logits), *streams)
            pre, post, res = self.coefficients(x)
            u = (pre.unsqueeze(-2) @ x).squeeze(-2)
            return Reading(u.to(dtype), post, res, x, x)

    def write(self, reading: Reading, y: Tensor, *, origin: Tensor | None = None) -> Tensor:
        """The streams after a layer has written ``y [..., C]`` to those that were read, less
        ``origin``.
        """
        x = reading.mixed
        with without_autocast(x.device):
            if self._kernels_serve(x):
                return kernels.write(x, reading.res, reading.post, y, origin)
            new = reading.res @ x + reading.post.unsqueeze(-1) * y.to(x.dtype).unsqueeze(-2)
            return new if origin is None else new - origin

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre and post, ``[..., n]``, and res, ``[..., n, n]``, of streams ``[..., n, C]``, in
        plain torch.
        """
        v = x.flatten(-2)
        of_parts = zip(self.alpha, F.linear(v, self.phi).split(self.parts, -1), strict=True)
        s = torch.cat([alpha * part for alpha, part in of_parts], -1)
        s = s * (v.square().mean(-1, keepdim=True) + EPS).rsqrt() + self.bias
        pre, post, res = s.split(self.parts, -1)
        res = res.unflatten(-1, (self.streams, self.streams))
        return pre.sigmoid(), 2.0 * post.sigmoid(), self._mixing(res)

    def _mixing(self, logits: Tensor) -> Tensor:
        return sinkhorn_knopp(logits, iterations=self.iterations, backend=self.backend)

    def _kernels_serve(self, x: Tensor) -> bool:
        """Whether launches of ours take streams like these; says why where one asks for them."""
        if self.backend == "reference" or (self.backend == "auto" and not x.is_cuda):
            return False
        if self.streams > WIDEST:
            reason = f"the kernels serve up to {WIDEST} streams, not {self.streams}"
        elif x.dtype != torch.float32 or self.phi.dtype != torch.float32:
            reason = f"the kernels take fp32, not {x.dtype} and {self.phi.dtype}"
        elif "triton" not in available_backends():
            reason = "the kernels need triton and a card of compute capability 8.0 or more"
        else:
            return True
        if self.backend == "triton":
            raise RuntimeError(f'backend="triton" cannot serve this call: {reason}')
        if not torch.compiler.is_compiling():
            warnings.warn(f"plain torch serves this call: {reason}", RuntimeWarning, stacklevel=4)
        return False


def replicated(x: Tensor, streams: int) -> Tensor:
    """``[..., n, C]``: x in every stream, so that it keeps its weight in their mean."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1])
