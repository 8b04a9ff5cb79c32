"""The launches of a product with SiLU or its derivative in its epilogue, for Hopper."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.launches import DescribedLaunch
from .._core.lazy import lazy_module
from .._core.product_hopper import constants_of, in_bulk, plan_product

if TYPE_CHECKING:
    from . import kernels_hopper as kernels
else:
    kernels = lazy_module(__package__, "kernels_hopper")

Tensor = torch.Tensor


class ProductConstants(NamedTuple):
    """What a kernel is compiled for, read as ``CONFIG``: as ``kernels_product_hopper`` has it, and
    KEEPS: whether u is written beside h.
    """

    SLICES: int
    ROWS: int
    BLOCK_COLS: int
    PART_COLS: int
    ROUNDS: int
    PLACES: int
    LOADS: bool
    WHOLE: bool
    COLUMNS: int
    REGISTERS: int
    COPYING_REGISTERS: int
    COLS_FIRST: bool
    KEEPS: bool


class Faster(NamedTuple):
    """From so many tiles of a program for each slice of its panel, the epilogue takes less time
    than a pass over memory, forward and backward: before, the panel's way into shared memory costs
    more.
    """

    forward: float
    backward: float


# Measured on an H200.
FASTER = Faster(forward=0.9, backward=0.4)


def product_silu(x: Tensor, weight: Tensor, keeps: bool) -> tuple[Tensor | None, Tensor]:
    """``(u, h)``, u = x weight^T and h = SiLU(u), of contiguous tensors; u is None unless it
    ``keeps``.
    """
    cols, inner = weight.shape
    h = x.new_empty((*x.shape[:-1], cols))
    u = torch.empty_like(h) if keeps else None
    x, of_h = as_matrix(x), as_matrix(h)
    launch = plan_silu(x.shape[0], inner, cols, x.dtype, keeps, x.device)
    launch((in_bulk(x), in_bulk(weight), of_h if u is None else as_matrix(u), of_h))
    return u, h


def product_silu_backward(dy: Tensor, weight: Tensor, u: Tensor) -> Tensor:
    """(dy weight) * SiLU'(u), of contiguous tensors."""
    du = u.new_empty(u.shape)
    dy = as_matrix(dy)
    launch = plan_silu_backward(dy.shape[0], *weight.shape, dy.dtype, dy.device)
    launch((in_bulk(dy), in_bulk(weight), in_bulk(as_matrix(u)), as_matrix(du)))
    return du


def as_matrix(x: Tensor) -> Tensor:
    """All leading axes as one."""
    return x if x.ndim == 2 else x.view(-1, x.shape[-1])


@functools.lru_cache(maxsize=4096)
def plan_silu(
    rows: int, inner: int, cols: int, dtype: torch.dtype, keeps: bool, device: torch.device
) -> DescribedLaunch:
    """The launch of ``product_silu`` on so many rows of ``inner`` columns."""
    constants = constants_of(inner, cols_first=True, loads=False)
    config = ProductConstants(**constants, KEEPS=keeps)
    return plan_product(kernels.hopper_silu_kernel, rows, cols, config, 2, device)


@functools.lru_cache(maxsize=4096)
def plan_silu_backward(
    rows: int, inner: int, cols: int, dtype: torch.dtype, device: torch.device
) -> DescribedLaunch:
    """The launch of ``product_silu_backward``."""
    config = ProductConstants(**constants_of(inner, cols_first=False, loads=True), KEEPS=False)
    return plan_product(kernels.hopper_silu_backward_kernel, rows, cols, config, 2, device)
