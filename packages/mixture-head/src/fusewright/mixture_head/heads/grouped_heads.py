r"""G two-layer networks over one shared input, three outputs each.

    u = x A^T                     A [G * S, d], the first layers one below the other
    out_g = SiLU(u_g) C_g         C [G, S, 3], SiLU(u) = u * sigmoid(u)

The input is shared, so the first layers are one dense product, torch's own. The second layers are
narrow: kernels apply SiLU and the three columns of a head in one pass over u, and in the backward
pass, which reads u once more, write du and dC; the activation is never stored:

    dSiLU_g = dout_g C_g^T,  du = dSiLU * sigmoid(u) * (1 + u * (1 - sigmoid(u)))
    dC_g    = sum over rows of SiLU(u_g)^T dout_g

Saved for it: u and C, or x, A and C (recomputed_heads.py). Products and sums of the second layer
are fp32, dC adds partial sums over the rows in a fixed order. Of a width F that is stored as S > F,
rows of A and of C beyond F that are zero give and get exactly zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_floating
from .._core.precision import autocast, autocasts
from .._core.registration import Derivative, Op
from . import launch, reference
from .recomputed_heads import recomputed_heads

Tensor = torch.Tensor


def _forward_reference(u, weight):
    return reference.silu_heads(u, weight).contiguous()


def _forward_fake(u, weight):
    dtype = torch.promote_types(u.dtype, torch.float32)
    return u.new_empty((*u.shape[:-1], 3), dtype=dtype)


def _backward_reference(dparams, u, weight):
    du, dweight = reference.silu_heads_backward(dparams, u, weight)
    return du.contiguous(), dweight.contiguous()


def _backward_fake(dparams, u, weight):
    return u.new_empty(u.shape), weight.new_empty(weight.shape)


_forward = Op(
    "silu_heads(Tensor u, Tensor weight) -> Tensor",
    triton=launch.silu_heads,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    "silu_heads_backward(Tensor dparams, Tensor u, Tensor weight) -> (Tensor du, Tensor dweight)",
    triton=launch.silu_heads_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference()


@_forward.derivative
class _SiLUHeads(Derivative):
    @staticmethod
    def forward(ctx, run, u, weight):
        ctx.save_for_backward(u, weight)
        return run(u, weight)

    @staticmethod
    def backward(ctx, dparams):
        return None, *_backward(dparams, *ctx.saved_tensors)


def grouped_heads(
    x: Tensor,
    hidden_weight: Tensor,
    output_weight: Tensor,
    *,
    recompute: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """SiLU(x A^T) C of every head.

    Args:
        x: ``[..., d]``, the input of every head, in fp32, bf16 or fp16 (the reference takes fp64
            too).
        hidden_weight: A, ``[G * S, d]``, in x's dtype, the first layer of a head below that of the
            one before; S is the stored width. Rows beyond the width that is used are zero.
        output_weight: C, ``[G, S, 3]``, of any of these dtypes: fp32 beside a bf16 x is fine.
        recompute: the kernels go through the rows in chunks and keep the hidden layer of one chunk
            alone, forward and backward, with or without gradients: it is computed again for the
            backward pass. The reference does the same with or without it.
        backend: "auto" takes the kernels for CUDA tensors and the reference for CPU tensors;
            "triton" raises where the kernels cannot serve.

    Returns:
        ``[..., G, 3]``, contiguous, in fp32 (fp64 for fp64 x). Under autocast the dense product is
        of the autocast dtype, the second layer fp32.

    Differentiable in all three, twice; the second derivative runs in plain torch.

    Raises:
        TypeError: a tensor is not floating point or not strided, or recompute is no bool.
        ValueError: x has no axis, a weight's shape does not fit, the devices differ, or outside
            autocast x and hidden_weight differ in dtype.
        RuntimeError: backend is "triton" and the kernels cannot serve this call.
    """
    check_heads(x, hidden_weight, output_weight)
    check_recompute(recompute)
    if not uses_triton(x, backend):
        return reference.grouped_heads(x, hidden_weight, output_weight)
    if recompute:
        return recomputed_heads(*autocast(x, hidden_weight), output_weight)
    u = F.linear(x, hidden_weight).unflatten(-1, output_weight.shape[:2])
    return _forward(u, output_weight)


def check_recompute(recompute: bool) -> None:
    """Raise for what is neither True nor False."""
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute must be True or False, got {type(recompute).__name__}")


def check_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> None:
    """``[..., d]``, ``[G * S, d]`` and ``[G, S, 3]``, floating and on one device; the first two of
    one dtype, unless autocast makes them so.
    """
    for name, tensor in (
        ("x", x),
        ("hidden_weight", hidden_weight),
        ("output_weight", output_weight),
    ):
        check_floating(name, tensor)
        check_device(name, tensor, "x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar")
    if output_weight.ndim != 3 or output_weight.shape[-1] != 3:
        raise ValueError(
            f"output_weight must be [heads, S, 3], got shape {tuple(output_weight.shape)}"
        )
    heads, stored, _ = output_weight.shape
    wanted = (heads * stored, x.shape[-1])
    if tuple(hidden_weight.shape) != wanted:
        raise ValueError(
            f"hidden_weight must have shape {wanted}, heads * S rows of x's width, "
            f"got {tuple(hidden_weight.shape)}"
        )
    if hidden_weight.dtype != x.dtype and not autocasts(x.device.type):
        raise ValueError(
            f"hidden_weight must have x's dtype {x.dtype} outside autocast, "
            f"got {hidden_weight.dtype}"
        )
