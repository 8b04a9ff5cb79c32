r"""Grouped heads whose hidden layer is never all in memory: one chunk of rows after the other.

    u = x A^T                     A [G * S, d], the first layers one below the other
    out_g = SiLU(u_g) C_g         C [G, S, 3]
    dx = du A,  dA = du^T x       du and dC as in grouped_heads

All chunks have one buffer. The forward pass computes u of a chunk there and its outputs from it;
the backward pass computes u again and writes du over it. Four dense products, where storing u
takes three.

Saved for it: x, A and C. dA and dC of several chunks are added in fp32, in the order of the rows,
and rounded once.
"""

from __future__ import annotations

import math

import torch

from .._core.precision import without_autocast
from .._core.registration import Derivative, Op, empty_grad
from . import launch, reference
from .launch_hopper import has_epilogue, product_heads

Tensor = torch.Tensor

# Hidden units of a chunk, 256 MiB in bf16, and what its rows are a multiple of: whole tiles of a
# product. Source: docs/decisions/0026-heads-h200.csv.
CHUNK_UNITS, CHUNK_MULTIPLE = 2**27, 128


def chunk_rows(units: int) -> int:
    """How many rows of so many hidden units each are a chunk."""
    return max(1, CHUNK_UNITS // (max(1, units) * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


def _chunks(x: Tensor, weight: Tensor) -> tuple[Tensor, list[slice], Tensor]:
    """The rows of x, what each chunk has of them, and the buffer for u, ``[rows, G, S]``."""
    heads, stored, _ = weight.shape
    rows = x.contiguous().view(math.prod(x.shape[:-1]), x.shape[-1])
    step = chunk_rows(heads * stored)
    slices = [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]
    return rows, slices, x.new_empty(min(step, len(rows)), heads, stored)


def _hidden(rows: Tensor, hidden_weight: Tensor, buffer: Tensor) -> Tensor:
    """u of these rows, in the buffer."""
    u = buffer[: len(rows)]
    torch.mm(rows, hidden_weight.mT, out=u.view(len(rows), len(hidden_weight)))
    return u


def _forward_triton(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    x, hidden_weight = x.contiguous(), hidden_weight.contiguous()
    if has_epilogue(x, hidden_weight):
        return product_heads(x, hidden_weight, output_weight, keeps=False)[0]
    rows, slices, buffer = _chunks(x, output_weight)
    out = _forward_fake(x, hidden_weight, output_weight)
    params = out.view(len(rows), len(output_weight), 3)
    transposed_weight = launch.transposed(output_weight)
    for chunk in slices:
        u = _hidden(rows[chunk], hidden_weight, buffer)
        params[chunk] = launch.silu_heads_of(u, transposed_weight)
    return out


def _forward_reference(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    with without_autocast(x.device):
        return reference.grouped_heads(x, hidden_weight, output_weight)


def _forward_fake(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], len(output_weight), 3), dtype=dtype)


def _backward_triton(
    dparams: Tensor, x: Tensor, hidden_weight: Tensor, output_weight: Tensor, x_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, slices, buffer = _chunks(x, output_weight)
    hidden_weight = hidden_weight.contiguous()
    dparams = dparams.reshape(len(rows), len(output_weight), 3)
    # The gradient of each chunk has its dtype.
    wide_weight = output_weight.float()
    # One chunk's product is dA.
    dtype = x.dtype if len(slices) == 1 else torch.float32
    dhidden = hidden_weight.new_zeros(hidden_weight.shape, dtype=dtype)
    doutput = torch.zeros_like(wide_weight, memory_format=torch.contiguous_format)
    dx = x.new_empty(x.shape) if x_grad else empty_grad(x)
    with without_autocast(x.device):
        for chunk in slices:
            u = _hidden(rows[chunk], hidden_weight, buffer)
            doutput += launch.silu_heads_backward_(dparams[chunk], u, wide_weight)
            du = u.view(len(u), len(hidden_weight))
            _add_product_(dhidden, du.mT, rows[chunk])
            if x_grad:
                torch.mm(du, hidden_weight, out=dx.view(rows.shape)[chunk])
    return dx, dhidden.to(hidden_weight.dtype), doutput.to(output_weight.dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, added before anything is rounded."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _backward_reference(
    dparams: Tensor, x: Tensor, hidden_weight: Tensor, output_weight: Tensor, x_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = reference.grouped_heads_backward(dparams, x, hidden_weight, output_weight)
    dx, dhidden, doutput = (gradient.contiguous() for gradient in gradients)
    return dx if x_grad else empty_grad(x), dhidden, doutput


def _backward_fake(
    dparams: Tensor, x: Tensor, hidden_weight: Tensor, output_weight: Tensor, x_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape) if x_grad else empty_grad(x),
        hidden_weight.new_empty(hidden_weight.shape),
        output_weight.new_empty(output_weight.shape),
    )


recomputed_heads = Op(
    "recomputed_heads(Tensor x, Tensor hidden_weight, Tensor output_weight) -> Tensor",
    triton=_forward_triton,
    reference=_forward_reference,
    fake=_forward_fake,
)
_backward = Op(
    "recomputed_heads_backward(Tensor dparams, Tensor x, Tensor hidden_weight,"
    " Tensor output_weight, bool x_grad) -> (Tensor dx, Tensor dhidden, Tensor doutput)",
    triton=_backward_triton,
    reference=_backward_reference,
    fake=_backward_fake,
)
_backward.derivative_of_reference()


@recomputed_heads.derivative
class _RecomputedHeads(Derivative):
    @staticmethod
    def forward(ctx, run, x, hidden_weight, output_weight):
        ctx.save_for_backward(x, hidden_weight, output_weight)
        return run(x, hidden_weight, output_weight)

    @staticmethod
    def backward(ctx, dparams):
        x_grad = ctx.needs_input_grad[1]
        dx, dhidden, doutput = _backward(dparams, *ctx.saved_tensors, x_grad)
        return None, dx if x_grad else None, dhidden, doutput
