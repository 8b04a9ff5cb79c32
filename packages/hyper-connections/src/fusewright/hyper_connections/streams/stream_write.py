r"""What a layer writes to residual streams, as mHC's hyper-connections have it.

    x'_i = sum_j res_ij x_j + post_i y            less origin_i, where there is one

x and origin are [..., n, C], res is [..., n, n], post [..., n] and y [..., C]; every other axis
counts tokens. Forward and backward are one launch each. With g the gradient of x',

    dx_j = sum_i res_ij g_i    dy = sum_i post_i g_i    dres_ij = g_i . x_j    dpost_i = g_i . y

and that of the origin is g with a pending negation, for which nothing is written: the backward pass
of ``stream_read`` subtracts it where it adds the others. Saved: x, res, post and y. Sums are fp32;
x' is fp32, dy in y's dtype. The derivative stands around the registered ops, as in ``stream_read``,
which has the paper too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .._core.backends import Backend, check_backend
from .._core.precision import wide, without_autocast
from .._core.registration import Op
from . import launch, launch_backward, reference
from .checks import check_beside, check_streams, serves

Tensor = torch.Tensor


def _write_fake(x, res, post, y, origin):
    return torch.empty_like(x)


def _write_backward_fake(g, x, res, post, y):
    return tuple(torch.empty_like(t) for t in (x, res, post, y))


_write = Op(
    "stream_write(Tensor x, Tensor res, Tensor post, Tensor y, Tensor? origin) -> Tensor",
    triton=launch.stream_write,
    reference=reference.stream_write,
    fake=_write_fake,
)
_write_backward = Op(
    "stream_write_backward(Tensor g, Tensor x, Tensor res, Tensor post, Tensor y)"
    " -> (Tensor dx, Tensor dres, Tensor dpost, Tensor dy)",
    triton=launch_backward.stream_write_backward,
    reference=reference.stream_write_backward,
    fake=_write_backward_fake,
)


class _Write(torch.autograd.Function):
    """res x + post y, less the origin."""

    @staticmethod
    def forward(ctx: Any, x, res, post, y, origin):
        ctx.save_for_backward(x, res, post, y)
        return _write(x, res, post, y, origin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g):
        g = g.contiguous()
        dx, dres, dpost, dy = _write_backward(g, *ctx.saved_tensors)
        if not ctx.needs_input_grad[4]:
            return dx, dres, dpost, dy, None
        # Negated where it is read.
        dorigin = -g if torch.compiler.is_compiling() else torch._neg_view(g)
        return dx, dres, dpost, dy, dorigin


def stream_write(
    x: Tensor,
    res: Tensor,
    post: Tensor,
    y: Tensor,
    *,
    origin: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The streams after a layer has written ``y`` to them, mixed by ``res``.

    Args:
        x: ``[..., n, C]``, the streams that were read, ``mixed`` of a ``StreamReading``; converted
            to fp32 (fp64 streams stay). The kernels serve n up to 8.
        res: ``[..., n, n]``, the matrix that mixes them, in mHC a doubly stochastic one.
        post: ``[..., n]``, how much each stream gets of y.
        y: ``[..., C]``, the layer's output, in fp32, bf16 or fp16 (the reference takes fp64 too).
        origin: ``[..., n, C]``, subtracted from the result: ``origin`` of a ``StreamReading``, so
            that the result is the difference to the streams that were read.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., n, C]``, in fp32 (in fp64 for fp64 streams), under autocast too. Differentiable in
        all tensors, with the reference twice.

    Raises:
        TypeError: a tensor is not floating or not strided.
        ValueError: shapes or devices do not agree.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_streams("x", x)
    *leading, n, width = x.shape
    check_beside("res", res, (*leading, n, n), x)
    check_beside("post", post, (*leading, n), x)
    check_beside("y", y, (*leading, width), x)
    if origin is not None:
        check_beside("origin", origin, (*leading, n, width), x)
    check_backend(backend)
    x = wide(x)
    res, post = res.to(x.dtype), post.to(x.dtype)
    origin = None if origin is None else origin.to(x.dtype)
    if not serves(x, backend):
        with without_autocast(x.device):
            return reference.stream_write(x, res, post, y, origin)
    # Nothing here that autocast would cast.
    of_tokens = x.reshape(-1, n, width), res.reshape(-1, n, n), post.reshape(-1, n)
    flat = (t.contiguous() for t in (*of_tokens, y.reshape(-1, width)))
    start = None if origin is None else origin.reshape(-1, n, width).contiguous()
    return _Write.apply(*flat, start).view(x.shape)
