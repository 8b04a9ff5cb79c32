"""Reading and writing of streams as registered ops, and their derivatives.

A reading hands the streams on, once to be mixed and once to be subtracted. So the gradients that
arrive at them from a writing pass through the reading's backward pass, which adds them to its own
without a pass over memory for each sum.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NAMESPACE = "fusewright_models"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
PRESENT = "Tensor x, Tensor phi, Tensor alpha, Tensor bias"
SIGNATURES = {
    "stream_read": f"({PRESENT}, ScalarType dtype) -> (Tensor u, Tensor post, Tensor logits, "
    "Tensor s_hat, Tensor scale)",
    "stream_write": "(Tensor x, Tensor res, Tensor post, Tensor y, Tensor? origin) -> Tensor",
    "stream_read_backward": "(Tensor du, Tensor dpost, Tensor dlogits, Tensor? dmixed, "
    f"Tensor? dorigin, bool negated, {PRESENT}, Tensor s_hat, Tensor scale) -> (Tensor dx, "
    "Tensor dphi, Tensor dalpha, Tensor dbias)",
    "stream_write_backward": "(Tensor g, Tensor x, Tensor res, Tensor post, Tensor y) -> "
    "(Tensor dx, Tensor dres, Tensor dpost, Tensor dy)",
}


def _launched(name: str) -> Any:
    def implementation(*operands: Any) -> Any:
        # Triton is imported by the first call that needs it.
        from . import _stream_launches

        return getattr(_stream_launches, name.replace("stream_", "launch_"))(*operands)

    return implementation


for name, signature in SIGNATURES.items():
    LIBRARY.define(name + signature)
    LIBRARY.impl(name, _launched(name), "CUDA")
    if os.environ.get("TRITON_INTERPRET") == "1":
        LIBRARY.impl(name, _launched(name), "CPU")

OPS: Any = getattr(torch.ops, NAMESPACE)


@torch.library.register_fake(f"{NAMESPACE}::stream_read", lib=LIBRARY)
def stream_read_fake(x, phi, alpha, bias, dtype):
    tokens, n, width = x.shape
    u = x.new_empty(tokens, width, dtype=dtype)
    gates = x.new_empty(tokens, n), x.new_empty(tokens, n, n)
    return u, *gates, x.new_empty(tokens, bias.shape[0]), x.new_empty(tokens)


@torch.library.register_fake(f"{NAMESPACE}::stream_write", lib=LIBRARY)
def stream_write_fake(x, res, post, y, origin):
    return torch.empty_like(x)


@torch.library.register_fake(f"{NAMESPACE}::stream_read_backward", lib=LIBRARY)
def stream_read_backward_fake(
    du, dpost, dlogits, dmixed, dorigin, negated, x, phi, alpha, bias, s_hat, scale
):
    return tuple(torch.empty_like(t) for t in (x, phi, alpha, bias))


@torch.library.register_fake(f"{NAMESPACE}::stream_write_backward", lib=LIBRARY)
def stream_write_backward_fake(g, x, res, post, y):
    return tuple(torch.empty_like(t) for t in (x, res, post, y))


class Read(torch.autograd.Function):
    """u, post, the logits of res, and x twice."""

    @staticmethod
    def forward(ctx, x, phi, alpha, bias, dtype):
        u, post, logits, s_hat, scale = OPS.stream_read(x, phi, alpha, bias, dtype)
        ctx.save_for_backward(x, phi, alpha, bias, s_hat, scale)
        ctx.set_materialize_grads(False)
        ctx.like = u.dtype
        return u, post, logits, x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, du, dpost, dlogits, dmixed, dorigin):
        x, *_ = saved = ctx.saved_tensors
        tokens, n, width = x.shape
        du = x.new_zeros(tokens, width, dtype=ctx.like) if du is None else du
        dpost = x.new_zeros(tokens, n) if dpost is None else dpost
        dlogits = x.new_zeros(tokens, n, n) if dlogits is None else dlogits
        negated = dorigin is not None and not torch.compiler.is_compiling() and dorigin.is_neg()
        if negated:
            dorigin = torch._neg_view(dorigin)
        given = [None if t is None else t.contiguous() for t in (dmixed, dorigin)]
        arrived = du.contiguous(), dpost.contiguous(), dlogits.contiguous(), *given
        return *OPS.stream_read_backward(*arrived, negated, *saved), None


class Write(torch.autograd.Function):
    """res x + post y, less the origin."""

    @staticmethod
    def forward(ctx, x, res, post, y, origin):
        ctx.save_for_backward(x, res, post, y)
        return OPS.stream_write(x, res, post, y, origin)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        g = g.contiguous()
        dx, dres, dpost, dy = OPS.stream_write_backward(g, *ctx.saved_tensors)
        if not ctx.needs_input_grad[4]:
            return dx, dres, dpost, dy, None
        # Negated where it is read.
        dorigin = -g if torch.compiler.is_compiling() else torch._neg_view(g)
        return dx, dres, dpost, dy, dorigin


def read(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of streams ``[.., n, C]``: u ``[.., C]`` in a dtype, post ``[.., n]``, the logits of res
    ``[.., n, n]``, and x twice.
    """
    leading, flat = x.shape[:-2], x.reshape(-1, *x.shape[-2:]).contiguous()
    found = Read.apply(flat, phi.contiguous(), alpha.contiguous(), bias.contiguous(), dtype)
    return tuple(t.view(*leading, *t.shape[1:]) for t in found)


def write(x: Tensor, res: Tensor, post: Tensor, y: Tensor, origin: Tensor | None) -> Tensor:
    """res x + post y, less the origin: ``[.., n, C]``, y ``[.., C]``."""
    n, width = x.shape[-2:]
    flat = x.reshape(-1, n, width), res.reshape(-1, n, n), post.reshape(-1, n), y.reshape(-1, width)
    start = None if origin is None else origin.reshape(-1, n, width).contiguous()
    return Write.apply(*(t.contiguous() for t in flat), start).view(x.shape)
