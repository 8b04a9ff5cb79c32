"""The launches of feed_forward, forward and backward: products by torch, SiLU by kernels.

Operands are multiplied as contiguous matrices, so that every layout gives the same bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .._core.launches import Launch, cdiv
from .._core.lazy import lazy_module
from .._core.registration import empty_grad
from ..gating import launch as gating

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


def feed_forward(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, u, h)``: SiLU(x A^T) C^T, and what the backward pass needs, x A^T and its SiLU."""
    u = product(x, hidden_weight.contiguous().mT)
    h = torch.empty_like(u)
    silu(u, h)
    return product(h, output_weight.contiguous().mT), u, h


def feed_forward_inference(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, None, None]:
    """``(y, None, None)``; SiLU is computed in place."""
    u = product(x, hidden_weight.contiguous().mT)
    silu(u, u)
    return product(u, output_weight.contiguous().mT), None, None


def feed_forward_backward(
    dy: Tensor,
    x: Tensor,
    hidden_weight: Tensor,
    output_weight: Tensor,
    u: Tensor,
    h: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and C, empty where not ``wanted``."""
    x_grad, hidden_weight_grad, output_weight_grad = wanted
    dx = dhidden_weight = doutput_weight = empty_grad(x)
    dy = dy.contiguous()
    if x_grad or hidden_weight_grad:
        du = product(dy, output_weight.contiguous())
        silu_backward(du, u)
        if x_grad:
            dx = product(du, hidden_weight.contiguous())
        if hidden_weight_grad:
            dhidden_weight = product_of_rows(du, x.contiguous())
    if output_weight_grad:
        doutput_weight = product_of_rows(dy, h)
    return dx, dhidden_weight, doutput_weight


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x times a matrix, contiguous, of any leading axes of x."""
    rows, (cols, outputs) = x.shape[:-1].numel(), matrix.shape
    y = x.new_empty((*x.shape[:-1], outputs))
    torch.mm(x.contiguous().view(rows, cols), matrix, out=y.view(rows, outputs))
    return y


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """The sum over all rows of a^T b, of contiguous tensors."""
    rows = a.shape[:-1].numel()
    return torch.mm(a.view(rows, a.shape[-1]).mT, b.view(rows, b.shape[-1]))


def silu(u: Tensor, h: Tensor) -> None:
    """Write SiLU(u) into ``h``, which may be u; both are contiguous."""
    if u.numel():
        plan(kernels.silu_kernel, gating.FORWARD, u.numel(), u.dtype, u.device)((u, h))


def silu_backward(dh: Tensor, u: Tensor) -> None:
    """Make ``dh`` dh * SiLU'(u); both are contiguous."""
    if u.numel():
        config = gating.BACKWARD
        plan(kernels.silu_backward_kernel, config, u.numel(), u.dtype, u.device)((dh, u, dh))


@functools.lru_cache(maxsize=4096)
def plan(
    kernel: Any,
    config: gating.ElementsConfig,
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The launch over so many elements of a dtype, with the blocks of the gating, whose kernels
    read and write as many bytes an operation.
    """
    grid = (cdiv(elements, config.block),)
    options = dict(num_warps=config.num_warps)
    return Launch(kernel, grid, device, (elements,), options, BLOCK=config.block)
