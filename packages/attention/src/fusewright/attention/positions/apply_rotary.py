r"""Rotary positions of one tensor of heads, as models apply them to queries and to keys.

    x'_a = x_a cos_tj - x_b sin_tj
    x'_b = x_b cos_tj + x_a sin_tj

a and b are the columns of pair j of the first R columns of a head: j and j + R/2, or, interleaved,
2 j and 2 j + 1. The other D - R columns stay as they are, to the bit. Each row of the batch may
have positions of its own.

Saved for the backward pass, which rotates by the opposite angle: cos and sin. Everything is
computed in fp32 and rounded once. Linear in x, so the derivative of the backward pass is the op
again.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from __future__ import annotations

import torch

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_floating
from .._core.precision import wide_dtype, without_autocast
from .._core.registration import Derivative, Op
from . import launch_apply, reference
from .rotary import MAX_WIDTH

Tensor = torch.Tensor


def _reference(x, cos, sin, interleaved, back):
    # Under autocast torch.cat and torch.stack would return another dtype.
    with without_autocast(x.device):
        return reference.apply_rotary(x, cos, sin, interleaved, back)


def _fake(x, cos, sin, interleaved, back):
    return x.new_empty(x.shape)


_apply = Op(
    "apply_rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    triton=launch_apply.apply_rotary,
    reference=_reference,
    fake=_fake,
)


@_apply.derivative
class _ApplyRotary(Derivative):
    @staticmethod
    def forward(ctx, run, x, cos, sin, interleaved, back):
        ctx.save_for_backward(cos, sin)
        ctx.options = interleaved, not back
        return run(x, cos, sin, interleaved, back)

    @staticmethod
    def backward(ctx, dy):
        return None, _apply(dy, *ctx.saved_tensors, *ctx.options), None, None, None, None


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Queries or keys rotated by the angle of their token.

    Args:
        x: ``[B, T, H, D]``, fp32, bf16 or fp16 (the reference takes fp64 too), D up to 256.
        cos, sin: ``[T, R / 2]``, or ``[B, T, R / 2]`` for rows of the batch with positions of their
            own, of the angle of each token and pair, in fp32 (fp64 beside fp64). The first R
            columns, up to D, are rotated. They get no gradient.
        interleaved: columns 2 j and 2 j + 1 are pair j (as in GPT-J), rather than j and j + R / 2
            (as in GPT-NeoX and LLaMA).
        backend: "auto" takes the kernel for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernel cannot serve.

    Returns:
        ``[B, T, H, D]``, contiguous, in the dtype of x, under autocast too, as elementwise
        functions of torch.

    Any strides; the kernel copies only a tensor whose last axis is not contiguous. Differentiable
    in x, any number of times.

    Raises:
        TypeError: a tensor is not floating point or not strided, or interleaved is no bool.
        ValueError: the shapes, dtypes or devices are not as above, or cos or sin require a
            gradient.
        RuntimeError: backend is "triton" and the kernel cannot serve this call.
    """
    check_apply(x, cos, sin, interleaved)
    if not uses_triton(x, backend):
        return _reference(x, cos, sin, interleaved, False)
    return _apply(x, cos, sin, interleaved, False)


def check_apply(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """x must be [B, T, H, D], and cos and sin [T, R / 2] or [B, T, R / 2], which get no
    gradient.
    """
    check_floating("x", x)
    if x.ndim != 4:
        raise ValueError(f"x must be [batch, tokens, heads, width], got {tuple(x.shape)}")
    batches, tokens, _, width = x.shape
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"the width of a head must be 2 up to {MAX_WIDTH}, got {width}")
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved must be a bool, got {type(interleaved).__name__}")
    angles = wide_dtype(x)
    for name, each in (("cos", cos), ("sin", sin)):
        check_floating(name, each)
        if each.dtype != angles:
            raise ValueError(f"{name} must be {angles} with x of {x.dtype}, got {each.dtype}")
        check_device(name, each, "x", x)
        *leading, half = each.shape or (0,)
        if tuple(leading) not in ((tokens,), (batches, tokens)) or not 0 < 2 * half <= width:
            raise ValueError(
                f"{name} must be [{tokens}, R / 2] or [{batches}, {tokens}, R / 2] with an even R "
                f"up to {width}, got {tuple(each.shape)}"
            )
        if each.requires_grad:
            raise ValueError(f"{name} gets no gradient, and must not require one")
    if cos.shape != sin.shape:
        raise ValueError(f"sin must be shaped as cos {tuple(cos.shape)}, got {tuple(sin.shape)}")
