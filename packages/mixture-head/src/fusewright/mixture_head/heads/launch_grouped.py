"""The launches of grouped heads, forward and backward: dense products, and the second layers in the
epilogue of a product or by kernels of their own.

Operands are multiplied as contiguous matrices, so that every layout gives the same bits.
"""

from __future__ import annotations

import torch

from .._core.registration import empty_grad
from . import launch
from .launch_hopper import has_epilogue, product_heads

Tensor = torch.Tensor


def grouped_heads(x: Tensor, hidden_weight: Tensor, output_weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(out, u)``, u ``[..., G, S]`` = x A^T and out ``[..., G, 3]`` = SiLU(u) C."""
    x, hidden_weight = x.contiguous(), hidden_weight.contiguous()
    if has_epilogue(x, hidden_weight):
        out, u = product_heads(x, hidden_weight, output_weight, keeps=True)
        assert u is not None
        return out, u
    u = x.new_empty((*x.shape[:-1], *output_weight.shape[:2]))
    torch.mm(as_rows(x, 1), hidden_weight.mT, out=as_rows(u, 2))
    return launch.silu_heads(u, output_weight), u


def grouped_heads_inference(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, None]:
    """``(out, None)``; where the product has an epilogue, u is not written."""
    x, hidden_weight = x.contiguous(), hidden_weight.contiguous()
    if has_epilogue(x, hidden_weight):
        return product_heads(x, hidden_weight, output_weight, keeps=False)[0], None
    return grouped_heads(x, hidden_weight, output_weight)[0], None


def grouped_heads_backward(
    dparams: Tensor,
    x: Tensor,
    hidden_weight: Tensor,
    output_weight: Tensor,
    u: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and C, empty where not ``wanted``."""
    x_grad, hidden_weight_grad, output_weight_grad = wanted
    dx = dhidden_weight = empty_grad(x)
    du, doutput_weight = launch.silu_heads_backward(dparams, u, output_weight)
    du = as_rows(du, 2)
    if x_grad:
        dx = x.new_empty(x.shape)
        torch.mm(du, hidden_weight.contiguous(), out=as_rows(dx, 1))
    if hidden_weight_grad:
        dhidden_weight = torch.mm(du.mT, as_rows(x.contiguous(), 1))
    return dx, dhidden_weight, doutput_weight if output_weight_grad else empty_grad(x)


def as_rows(x: Tensor, axes: int) -> Tensor:
    """A contiguous tensor as a matrix, whose columns are its last ``axes`` axes."""
    return x.view(x.shape[:-axes].numel(), x.shape[-axes:].numel())
