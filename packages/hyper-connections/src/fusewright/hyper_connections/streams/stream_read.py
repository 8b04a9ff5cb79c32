r"""What a layer reads of residual streams, as mHC's hyper-connections have it.

With v the n streams x_1 ... x_n of a token, one after the other, and rms(v) their root mean square,

    s = alpha (Phi v) / rms(v) + b                  n numbers, n more, and n x n
    pre = sigma(s_pre)    post = 2 sigma(s_post)    logits of res = s_res
    u = sum_i pre_i x_i

x is [..., n, C], every other axis counts tokens; Phi is [n (n + 2), n C], alpha has three numbers,
b n (n + 2). A layer takes u; ``stream_write`` takes the layer's output, post, and a matrix res
that the caller computes from the logits, in mHC a doubly stochastic one by Sinkhorn and Knopp's
iterations.

Forward it is one launch: the dot products and the mean square in one pass over the streams, then u.
The products of Phi are TF32 in three parts, which is as near as fp32; everything else is fp32.
Saved for the backward pass, beside the inputs: s before alpha and b (s_hat), and 1 / rms(v).

The reading returns the streams twice, to be mixed and to be subtracted from the result. Both
gradients reach the reading's backward pass, and the launch that writes dx adds them: no pass over
memory for a sum. An op may not return one of its inputs, so the derivative is no part of the
registered ops: it is an autograd.Function around them.

Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, eq. 14-19.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .._core.backends import Backend, check_backend
from .._core.checks import checked_number
from .._core.precision import autocasts, wide, without_autocast
from .._core.registration import Op
from . import launch, launch_backward, reference
from .checks import check_gates, serves

Tensor = torch.Tensor


class StreamReading(NamedTuple):
    """What a layer reads of streams, and what writing to them needs.

    Attributes:
        u: ``[..., C]``, what the layer takes: in autocast's dtype where that is on, else in the
            streams'.
        post: ``[..., n]``, how much each stream gets of the layer's output.
        logits: ``[..., n, n]``, of the matrix that mixes the streams.
        mixed, origin: the streams ``[..., n, C]``, once to be mixed and once to be
            subtracted: the gradients of both are added in the backward pass of the reading.
    """

    u: Tensor
    post: Tensor
    logits: Tensor
    mixed: Tensor
    origin: Tensor


def _read_fake(x, phi, alpha, bias, eps, dtype):
    tokens, n, width = x.shape
    u = x.new_empty(tokens, width, dtype=dtype)
    gates = x.new_empty(tokens, n), x.new_empty(tokens, n, n)
    return u, *gates, x.new_empty(tokens, bias.shape[0]), x.new_empty(tokens)


def _read_backward_fake(
    du, dpost, dlogits, dmixed, dorigin, x, phi, alpha, bias, s_hat, scale, negated
):
    return tuple(torch.empty_like(t) for t in (x, phi, alpha, bias))


_read = Op(
    "stream_read(Tensor x, Tensor phi, Tensor alpha, Tensor bias, float eps, ScalarType dtype)"
    " -> (Tensor u, Tensor post, Tensor logits, Tensor s_hat, Tensor scale)",
    triton=launch.stream_read,
    reference=reference.stream_read,
    fake=_read_fake,
)
_read_backward = Op(
    "stream_read_backward(Tensor du, Tensor dpost, Tensor dlogits, Tensor? dmixed, Tensor? dorigin,"
    " Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor s_hat, Tensor scale, bool negated)"
    " -> (Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias)",
    triton=launch_backward.stream_read_backward,
    reference=reference.stream_read_backward,
    fake=_read_backward_fake,
)


class _Read(torch.autograd.Function):
    """u, post, the logits of res, and x twice."""

    @staticmethod
    def forward(ctx: Any, x, phi, alpha, bias, eps, dtype):
        u, post, logits, s_hat, scale = _read(x, phi, alpha, bias, eps, dtype)
        ctx.save_for_backward(x, phi, alpha, bias, s_hat, scale)
        ctx.set_materialize_grads(False)
        ctx.like = u.dtype
        return u, post, logits, x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du, dpost, dlogits, dmixed, dorigin):
        x, *_ = saved = ctx.saved_tensors
        tokens, n, width = x.shape
        du = x.new_zeros(tokens, width, dtype=ctx.like) if du is None else du
        dpost = x.new_zeros(tokens, n) if dpost is None else dpost
        dlogits = x.new_zeros(tokens, n, n) if dlogits is None else dlogits
        # A writing sends the origin's gradient as its own with a pending negation.
        negated = dorigin is not None and not torch.compiler.is_compiling() and dorigin.is_neg()
        if negated:
            dorigin = torch._neg_view(dorigin)
        given = [None if t is None else t.contiguous() for t in (dmixed, dorigin)]
        arrived = du.contiguous(), dpost.contiguous(), dlogits.contiguous(), *given
        return *_read_backward(*arrived, *saved, negated), None, None


def stream_read(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> StreamReading:
    """What a layer reads of streams, and what writing to them needs.

    Args:
        x: ``[..., n, C]``, n streams of C columns for each token, any strides. They are converted
            to fp32 (fp64 streams stay). The kernels serve n up to 8.
        phi: ``[n (n + 2), n C]``: the rows for pre, for post and for res.
        alpha: ``[3]``: factors of these three parts.
        bias: ``[n (n + 2)]``, b.
        eps: added to the mean square of a token's streams.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        A ``StreamReading``. Pass its ``mixed`` to ``stream_write``, and its ``origin`` where the
        difference to what was read is wanted; parameters are converted to the streams' dtype.
        Differentiable in all tensors, with the reference twice.

    Raises:
        TypeError: a tensor is not floating or not strided, or eps is no number.
        ValueError: shapes or devices do not agree, or eps is negative or not finite.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_gates(x, phi, alpha, bias)
    check_backend(backend)
    eps = checked_number("eps", eps, lowest=0.0)
    x = wide(x)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if autocasts(device) else x.dtype
    phi, alpha, bias = (parameter.to(x.dtype) for parameter in (phi, alpha, bias))
    if not serves(x, backend):
        with without_autocast(x.device):
            u, post, logits, *_ = reference.stream_read(x, phi, alpha, bias, eps, dtype)
        return StreamReading(u, post, logits, x, x)
    # Nothing here that autocast would cast.
    leading, flat = x.shape[:-2], x.reshape(-1, *x.shape[-2:]).contiguous()
    given = (parameter.contiguous() for parameter in (phi, alpha, bias))
    found = _Read.apply(flat, *given, eps, dtype)
    return StreamReading(*(t.view(*leading, *t.shape[1:]) for t in found))
