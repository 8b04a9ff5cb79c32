"""The launches of a product with SiLU or its derivative in its epilogue, for Hopper."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._core.backends import device_properties, interpreted
from .._core.launches import DescribedLaunch, cdiv, in_tiles
from .._core.lazy import lazy_module

if TYPE_CHECKING:
    from . import kernels_hopper
else:
    kernels_hopper = lazy_module(__package__, "kernels_hopper")

Tensor = torch.Tensor
DTYPES = torch.bfloat16, torch.float16
# Columns of a product's operands in a slice of shared memory.
SLICE = 64
# A row starts at a multiple of 16 bytes, or no descriptor reads it.
ALIGNED = 16


class ProductConfig(NamedTuple):
    """Tiles of ``rows`` rows and ``block_cols`` columns, of which the epilogue takes ``part_cols``
    at a time; ``places`` a group of warps for what is stored; so many registers a thread that
    multiplies and that copies.
    """

    rows: int
    block_cols: int
    part_cols: int
    places: int
    registers: int = 232
    copying_registers: int = 24


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
    REGISTERS: int
    COPYING_REGISTERS: int
    COLS_FIRST: bool
    KEEPS: bool


PRODUCT = ProductConfig(rows=64, block_cols=128, part_cols=64, places=2)
# Slices of a row that fit beside a panel of as many.
MOST_SLICES = 8
# Slices of which those of two tiles fit.
MOST_TWICE = 6


class Faster(NamedTuple):
    """From so many tiles of a program for each slice of its panel, the epilogue takes less time
    than a pass over memory, forward and backward: before, the panel's way into shared memory costs
    more.
    """

    forward: float
    backward: float


# Measured on an H200.
FASTER = Faster(forward=0.9, backward=0.4)


def serves(
    rows: int, inner: int, cols: int, dtype: torch.dtype, device: torch.device, fewest: float
) -> bool:
    """Whether products of so many rows, whose sums are over ``inner`` terms, have an epilogue,
    which is faster from ``fewest`` tiles of a program for each slice.
    """
    if dtype not in DTYPES or interpreted() or not (rows and inner and cols):
        return False
    properties = device_properties(device)
    slices = cdiv(inner, SLICE)
    if properties.capability != 90 or slices > MOST_SLICES:
        return False
    if inner * dtype.itemsize % ALIGNED or cols * dtype.itemsize % ALIGNED:
        return False
    return tiles_of(rows, cols) >= fewest * slices * properties.multiprocessors


def tiles_of(rows: int, cols: int) -> int:
    return cdiv(rows, PRODUCT.rows) * cdiv(cols, PRODUCT.block_cols)


def product_silu(x: Tensor, weight: Tensor, keeps: bool) -> tuple[Tensor | None, Tensor]:
    """``(u, h)``, u = x weight^T and h = SiLU(u), of contiguous tensors; u is None unless it
    ``keeps``.
    """
    h = x.new_empty((*x.shape[:-1], len(weight)))
    u = torch.empty_like(h) if keeps else None
    x, of_h = as_matrix(x), as_matrix(h)
    sizes = len(x), x.shape[1], len(weight)
    launch = plan_silu(*sizes, x.dtype, keeps, x.device)
    launch((in_bulk(x), in_bulk(weight), of_h if u is None else as_matrix(u), of_h))
    return u, h


def product_silu_backward(dy: Tensor, weight: Tensor, u: Tensor) -> Tensor:
    """(dy weight) * SiLU'(u), of contiguous tensors."""
    du = torch.empty_like(u)
    dy = as_matrix(dy)
    launch = plan_silu_backward(len(dy), *weight.shape, dy.dtype, dy.device)
    launch((in_bulk(dy), in_bulk(weight), as_matrix(u), as_matrix(du)))
    return du


def as_matrix(x: Tensor) -> Tensor:
    """All leading axes as one."""
    return x.view(-1, x.shape[-1])


def in_bulk(x: Tensor) -> Tensor:
    """A contiguous matrix that starts where a descriptor may."""
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


@functools.lru_cache(maxsize=4096)
def plan_silu(
    rows: int, inner: int, cols: int, dtype: torch.dtype, keeps: bool, device: torch.device
) -> DescribedLaunch:
    """The launch of ``product_silu`` on so many rows of ``inner`` columns."""
    launch = plan_product(
        kernels_hopper.hopper_silu_kernel, rows, inner, cols, True, False, keeps, device
    )
    stored = in_tiles(PRODUCT.rows, PRODUCT.part_cols)
    weight = in_tiles(PRODUCT.block_cols, SLICE)
    launch.descriptors = (in_tiles(PRODUCT.rows, SLICE), weight, stored, stored)
    return launch


@functools.lru_cache(maxsize=4096)
def plan_silu_backward(
    rows: int, inner: int, cols: int, dtype: torch.dtype, device: torch.device
) -> DescribedLaunch:
    """The launch of ``product_silu_backward``."""
    kernel = kernels_hopper.hopper_silu_backward_kernel
    launch = plan_product(kernel, rows, inner, cols, False, True, False, device)
    stored = in_tiles(PRODUCT.rows, PRODUCT.part_cols)
    weight = in_tiles(SLICE, PRODUCT.block_cols)
    launch.descriptors = (in_tiles(PRODUCT.rows, SLICE), weight, stored, stored)
    return launch


def plan_product(
    kernel: object,
    rows: int,
    inner: int,
    cols: int,
    cols_first: bool,
    loads: bool,
    keeps: bool,
    device: torch.device,
) -> DescribedLaunch:
    """A launch over all tiles of a product, but for its descriptors."""
    programs = device_properties(device).multiprocessors
    row_tiles, col_tiles = cdiv(rows, PRODUCT.rows), cdiv(cols, PRODUCT.block_cols)
    slices = cdiv(inner, SLICE)
    return DescribedLaunch(
        kernel,
        (min(programs, tiles_of(rows, cols)),),
        device,
        (row_tiles, col_tiles),
        dict(num_warps=4),
        CONFIG=ProductConstants(
            SLICES=slices,
            ROWS=PRODUCT.rows,
            BLOCK_COLS=PRODUCT.block_cols,
            PART_COLS=PRODUCT.part_cols,
            ROUNDS=2 if slices <= MOST_TWICE else 1,
            PLACES=PRODUCT.places,
            LOADS=loads,
            REGISTERS=PRODUCT.registers,
            COPYING_REGISTERS=PRODUCT.copying_registers,
            COLS_FIRST=cols_first,
            KEEPS=keeps,
        ),
    )
