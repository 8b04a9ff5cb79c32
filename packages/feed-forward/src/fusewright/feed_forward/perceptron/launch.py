"""The launches of feed_forward, forward and backward: products by torch, SiLU by kernels of its own
or, where that is faster, in the epilogue of a product.

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
from . import launch_hopper

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


def feed_forward(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, u, h)``: SiLU(x A^T) C^T, and what the backward pass needs, x A^T and its SiLU."""
    u, h = activated(x, hidden_weight)
    return product(h, output_weight.contiguous().mT), u, h


def activated(x: Tensor, hidden_weight: Tensor) -> tuple[Tensor, Tensor]:
    """x A^T and its SiLU."""
    hidden_weight = hidden_weight.contiguous()
    if has_epilogue(x, hidden_weight.mT, launch_hopper.FASTER.forward):
        u, h = launch_hopper.product_silu(x.contiguous(), hidden_weight, keeps=True)
        assert u is not None
        return u, h
    u = product(x, hidden_weight.mT)
    h = torch.empty_like(u)
    silu(u, h)
    return u, h


def has_epilogue(x: Tensor, matrix: Tensor, fewest: float) -> bool:
    """Whether what follows the product of x and a matrix is its epilogue."""
    inner, cols = matrix.shape
    return launch_hopper.serves(x.shape[:-1].numel(), inner, cols, x.dtype, x.device, fewest)


def feed_forward_inference(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, None, None]:
    """``(y, None, None)``; SiLU is computed in place."""
    hidden_weight = hidden_weight.contiguous()
    if has_epilogue(x, hidden_weight.mT, launch_hopper.FASTER.forward):
        _, h = launch_hopper.product_silu(x.contiguous(), hidden_weight, keeps=False)
    else:
        h = product(x, hidden_weight.mT)
        silu(h, h)
    return product(h, output_weight.contiguous().mT), None, None


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
        output_weight = output_weight.contiguous()
        if has_epilogue(dy, output_weight, launch_hopper.FASTER.backward):
            du = launch_hopper.product_silu_backward(dy, output_weight, u)
        else:
            du = product(dy, output_weight)
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
