r"""G two-layer networks over one shared input, three outputs each.

    u = x A^T                     A [G * S, d], the first layers one below the other
    out_g = SiLU(u_g) C_g         C [G, S, 3], SiLU(u) = u * sigmoid(u)

The input is shared, so the first layers are one dense product. The second layers are narrow: where
the product has an epilogue (launch_hopper.py), that computes their outputs from sums in registers,
and u is written only if a backward pass follows; elsewhere the product is torch's, and a kernel
applies SiLU and the three columns of a head in one pass over u. The backward pass reads u once more
and writes du and dC; the activation is never stored:

    dSiLU_g = dout_g C_g^T,  du = dSiLU * sigmoid(u) * (1 + u * (1 - sigmoid(u)))
    dC_g    = sum over rows of SiLU(u_g)^T dout_g
    dx      = du A,  dA = du^T x

Saved for it: x, A, C and u, or all but u (recomputed_heads.py). Products and sums of the second
layer are fp32; dC adds partial sums over the rows, and an epilogue's outputs add such over the
hidden units, in a fixed order. Of a width F that is stored as S > F, rows of A and of C beyond F
that are zero give and get exactly zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.backends import Backend, uses_triton
from .._core.checks import check_device, check_floating
from .._core.precision import autocasts, run_cast
from .._core.registration import Derivative, Op, empty_grad
from . import launch_grouped as launch
from . import reference
from .recomputed_heads import recomputed_heads

Tensor = torch.Tensor


def _forward_reference(x, hidden_weight, output_weight):
    u = F.linear(x, hidden_weight).unflatten(-1, output_weight.shape[:2])
    return reference.silu_heads(u, output_weight).contiguous(), u.contiguous()


def _forward_fake(x, hidden_weight, output_weight):
    heads, stored, _ = output_weight.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty((*x.shape[:-1], heads, 3), dtype=dtype)
    return out, x.new_empty((*x.shape[:-1], heads, stored))


def _backward_triton(dparams, x, hidden_weight, output_weight, u, *wanted):
    return launch.grouped_heads_backward(dparams, x, hidden_weight, output_weight, u, wanted)


def _backward_reference(dparams, x, hidden_weight, output_weight, u, *wanted):
    grads = reference.grouped_heads_backward(dparams, x, hidden_weight, output_weight)
    return tuple(
        grad.contiguous() if asked else empty_grad(x)
        for grad, asked in zip(grads, wanted, strict=True)
    )


def _backward_fake(dparams, x, hidden_weight, output_weight, u, *wanted):
    return tuple(
        each.new_empty(each.shape) if asked else empty_grad(x)
        for each, asked in zip((x, hidden_weight, output_weight), wanted, strict=True)
    )


_forward = Op(
    "grouped_heads(Tensor x, Tensor hidden_weight, Tensor output_weight) -> (Tensor out, Tensor u)",
    triton=launch.grouped_heads,
    reference=_forward_reference,
    fake=_forward_fake,
    inference=launch.grouped_heads_inference,
)
_backward = Op(
    "grouped_heads_backward(Tensor dparams, Tensor x, Tensor hidden_weight, Tensor output_weight,"
    " Tensor u, bool x_grad, bool hidden_weight_grad, bool output_weight_grad)"
    " -> (Tensor dx, Tensor dhidden, Tensor doutput)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference("u")


@_forward.derivative
class _GroupedHeads(Derivative):
    @staticmethod
    def forward(ctx, run, x, hidden_weight, output_weight):
        out, u = run(x, hidden_weight, output_weight)
        ctx.save_for_backward(x, hidden_weight, output_weight, u)
        ctx.set_materialize_grads(False)
        return out, *_forward.statistics(ctx, run, u)

    @staticmethod
    def backward(ctx, dparams, *_):
        if dparams is None:
            return (None,) * 4
        wanted = ctx.needs_input_grad[1:4]
        grads = _backward(dparams, *ctx.saved_tensors, *wanted)
        return None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True))


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
    run = recomputed_heads if recompute else _kept_heads
    return run_cast(lambda x, weight: run(x, weight, output_weight), x, hidden_weight)


def _kept_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    return _forward(x, hidden_weight, output_weight)[0]


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
