"""The launches of silu_linear, forward and backward: their configurations and plans."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties
from .._core.launches import Launch, cdiv
from .._core.lazy import lazy_module
from .._core.precision import power_of_2, wide
from .._core.registration import empty_grad
from .._core.rows import MAX_ROWS
from . import reference

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class TileConfig(NamedTuple):
    """A program takes ``rows`` by ``cols`` of the result at a time."""

    rows: int
    cols: int
    num_warps: int


# Source: docs/decisions/0025-narrow-h200.csv, on an H200, of 36,096 rows and 11 columns of x.
FORWARD = TileConfig(rows=16, cols=512, num_warps=4)
BACKWARD = TileConfig(rows=16, cols=64, num_warps=4)
# So many programs of the backward pass are on a multiprocessor, each with one part of dW.
PROGRAMS_PER_SM = 4
# Each element of the result takes as many multiplications as x has columns, beside its way to
# memory: of more than so many, the product is left to torch. Unmeasured.
MOST_COLUMNS = 64
# Of a grid's second axis.
MOST_TILES = 65_535


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether x is narrow, there is anything to compute, and a grid counts its tiles."""
    cols, inner = weight.shape
    if inner > MOST_COLUMNS or not (x.numel() and weight.numel()):
        return False
    tiles = cdiv(cols, min(FORWARD.cols, BACKWARD.cols))
    return x.numel() // inner <= MAX_ROWS and tiles <= MOST_TILES


def silu_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """SiLU(x W^T) in ``dtype``, contiguous."""
    if not serves(x, weight):
        return reference.silu_linear(x, weight, dtype)
    cols, inner = weight.shape
    h = x.new_empty((*x.shape[:-1], cols), dtype=dtype)
    launch = plan(h.numel() // cols, cols, inner, x.dtype, dtype, x.device)
    launch((x.contiguous(), weight.contiguous(), h))
    return h


def silu_linear_backward(
    dh: Tensor, x: Tensor, weight: Tensor, x_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and W, empty where not asked for."""
    if serves(x, weight):
        return narrow_backward(dh, x, weight, x_grad, weight_grad)
    dx, dweight = reference.silu_linear_backward(dh, x, weight)
    return dx if x_grad else empty_grad(x), dweight if weight_grad else empty_grad(x)


def narrow_backward(
    dh: Tensor, x: Tensor, weight: Tensor, x_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    """Likewise, by the kernel."""
    cols, inner = weight.shape
    rows = x.numel() // inner
    du = x.new_empty(dh.shape, dtype=torch.float32) if x_grad else None
    launch, programs = plan_backward(rows, cols, inner, x.dtype, dh.dtype, x_grad, x.device)
    parts = x.new_empty((programs, cols, inner), dtype=torch.float32)
    launch((dh.contiguous(), x.contiguous(), weight.contiguous(), du, parts))
    dx = empty_grad(x) if du is None else torch.matmul(du, wide(weight)).to(x.dtype)
    return dx, parts.sum(0).to(weight.dtype) if weight_grad else empty_grad(x)


# The dtypes are a part of the key: a launch serves one of each.
@functools.lru_cache(maxsize=4096)
def plan(
    rows: int,
    cols: int,
    inner: int,
    dtype: torch.dtype,
    result: torch.dtype,
    device: torch.device,
) -> Launch:
    """The launch of the forward pass."""
    return Launch(
        kernels.silu_linear_kernel,
        (cdiv(rows, FORWARD.rows), cdiv(cols, FORWARD.cols)),
        device,
        (rows, cols, inner),
        dict(num_warps=FORWARD.num_warps),
        BLOCK_ROWS=FORWARD.rows,
        BLOCK_COLS=FORWARD.cols,
    )


@functools.lru_cache(maxsize=4096)
def plan_backward(
    rows: int,
    cols: int,
    inner: int,
    dtype: torch.dtype,
    gradient: torch.dtype,
    x_grad: bool,
    device: torch.device,
) -> tuple[Launch, int]:
    """The launch of the backward pass, and how many parts of dW it writes."""
    col_tiles = cdiv(cols, BACKWARD.cols)
    most = cdiv(PROGRAMS_PER_SM * device_properties(device).multiprocessors, col_tiles)
    programs = min(cdiv(rows, BACKWARD.rows), most)
    launch = Launch(
        kernels.silu_linear_backward_kernel,
        (programs, col_tiles),
        device,
        (rows, cols, inner),
        dict(num_warps=BACKWARD.num_warps),
        BLOCK_ROWS=BACKWARD.rows,
        BLOCK_COLS=BACKWARD.cols,
        # Tensor cores multiply tiles of 16 columns and more.
        BLOCK_INNER=max(16, power_of_2(inner)),
    )
    return launch, programs
