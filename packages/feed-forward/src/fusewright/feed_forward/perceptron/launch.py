"""The launches of feed_forward, forward and backward: products by torch, SiLU by kernels of its own
or, where that is faster, in the epilogue of a product.

Operands are multiplied as contiguous matrices, so that every layout gives the same bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .._core.launches import Launch, cdiv
from .._core.lazy import lazy_module
from .._core.product_hopper import serves
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
    return linear(h, output_weight), u, h


def activated(x: Tensor, hidden_weight: Tensor) -> tuple[Tensor, Tensor]:
    """x A^T and its SiLU."""
    if has_epilogue(x, hidden_weight.shape[0], launch_hopper.FASTER.forward):
        u, h = launch_hopper.product_silu(x.contiguous(), hidden_weight.contiguous(), keeps=True)
        assert u is not None
        return u, h
    u = linear(x, hidden_weight)
    h = torch.empty_like(u)
    silu(u, h)
    return u, h


def has_epilogue(x: Tensor, cols: int, fewest: float) -> bool:
    """Whether what follows a product of x that has so many columns is its epilogue."""
    shape = x.shape
    return serves(shape[:-1].numel(), shape[-1], cols, x.dtype, x.device, fewest)


def feed_forward_inference(
    x: Tensor, hidden_weight: Tensor, output_weight: Tensor
) -> tuple[Tensor, None, None]:
    """``(y, None, None)``; SiLU is computed in place."""
    if has_epilogue(x, hidden_weight.shape[0], launch_hopper.FASTER.forward):
        _, h = launch_hopper.product_silu(x.contiguous(), hidden_weight.contiguous(), keeps=False)
    else:
        h = linear(x, hidden_weight)
        silu(h, h)
    return linear(h, output_weight), None, None


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
    dy = dy.contiguous()
    if x_grad or hidden_weight_grad:
        u = u.contiguous()
        if has_epilogue(dy, output_weight.shape[1], launch_hopper.FASTER.backward):
            du = launch_hopper.product_silu_backward(dy, output_weight.contiguous(), u)
        else:
            du = product(dy, output_weight)
            silu_backward(du, u)
    dx = product(du, hidden_weight) if x_grad else empty_grad(x)
    dhidden_weight = product_of_rows(du, x) if hidden_weight_grad else empty_grad(x)
    doutput_weight = product_of_rows(dy, h) if output_weight_grad else empty_grad(x)
    return dx, dhidden_weight, doutput_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x times the transpose of a weight, of any leading axes of x, none included."""
    if x.ndim == 1:
        return linear(x.unsqueeze(0), weight).squeeze(0)
    return F.linear(x.contiguous(), weight.contiguous())


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x times a matrix, likewise."""
    if x.ndim == 1:
        return product(x.unsqueeze(0), matrix).squeeze(0)
    return torch.matmul(x.contiguous(), matrix.contiguous())


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """The sum over all rows of a^T b; a is contiguous."""
    b = b.contiguous()
    if a.ndim != 2:
        rows = a.shape[:-1].numel()
        a, b = a.view(rows, a.shape[-1]), b.view(rows, b.shape[-1])
    return torch.mm(a.mT, b)


def silu(u: Tensor, h: Tensor) -> None:
    """Write SiLU(u) into ``h``, which may be u; both are contiguous."""
    if elements := u.numel():
        plan_silu(elements, u.dtype, u.device)((u, h))


def silu_backward(dh: Tensor, u: Tensor) -> None:
    """Make ``dh`` dh * SiLU'(u); both are contiguous."""
    if elements := u.numel():
        plan_silu_backward(elements, u.dtype, u.device)((dh, u, dh))


# The dtype is a part of the key: a launch serves one. A kernel is none, since its hash takes the
# host longer than all of this.
@functools.lru_cache(maxsize=4096)
def plan_silu(elements: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch over so many elements of a dtype, with the blocks of the gating, whose kernels
    read and write as many bytes an operation.
    """
    return plan(kernels.silu_kernel, gating.FORWARD, elements, device)


@functools.lru_cache(maxsize=4096)
def plan_silu_backward(elements: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Likewise."""
    return plan(kernels.silu_backward_kernel, gating.BACKWARD, elements, device)


def plan(kernel: Any, config: gating.ElementsConfig, elements: int, device: torch.device) -> Launch:
    grid = (cdiv(elements, config.block),)
    options = dict(num_warps=config.num_warps)
    return Launch(kernel, grid, device, (elements,), options, BLOCK=config.block)
