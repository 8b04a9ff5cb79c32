"""What all launches of a product of matrices with an epilogue share, for Hopper: where one serves,
its tiles, and what ``kernels_product_hopper`` reads as CONFIG.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .backends import device_properties, interpreted
from .launches import DescribedLaunch, cdiv, in_tiles
from .rows import MAX_ROWS

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


PRODUCT = ProductConfig(rows=64, block_cols=128, part_cols=64, places=2)
# Slices of a row that fit beside a panel of as many.
MOST_SLICES = 8
# Slices of which those of two tiles fit.
MOST_TWICE = 6


def serves(
    rows: int, inner: int, cols: int, dtype: torch.dtype, device: torch.device, fewest: float
) -> bool:
    """Whether products of so many rows, whose sums are over ``inner`` terms, have an epilogue,
    which is faster from ``fewest`` tiles of a program for each slice.
    """
    if dtype not in DTYPES or interpreted() or not (rows and inner and cols):
        return False
    if max(rows, cols) > MAX_ROWS:
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


def in_bulk(x: Tensor) -> Tensor:
    """A contiguous matrix as a descriptor reads it: it starts where one may, and the stride of its
    rows, which is any where there is one row, is their length.
    """
    if x.data_ptr() % ALIGNED == 0 and x.stride(0) == x.shape[1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def constants_of(
    inner: int, *, cols_first: bool, loads: bool, whole: bool = False, columns: int = 0
) -> dict[str, Any]:
    """The fields of CONFIG that a product over ``inner`` columns reads."""
    slices = cdiv(inner, SLICE)
    return dict(
        SLICES=slices,
        ROWS=PRODUCT.rows,
        BLOCK_COLS=PRODUCT.block_cols,
        PART_COLS=PRODUCT.part_cols,
        ROUNDS=2 if slices <= MOST_TWICE else 1,
        PLACES=PRODUCT.places,
        LOADS=loads,
        WHOLE=whole,
        COLUMNS=columns,
        REGISTERS=PRODUCT.registers,
        COPYING_REGISTERS=PRODUCT.copying_registers,
        COLS_FIRST=cols_first,
    )


def plan_product(
    kernel: Any,
    rows: int,
    cols: int,
    config: Any,
    stored: int,
    device: torch.device,
    scalars: tuple[int, ...] = (),
) -> DescribedLaunch:
    """A launch over all tiles of a product: of a, b, and so many matrices of c's shape, by
    descriptors. ``scalars`` follow the numbers of tiles.
    """
    sizes = cdiv(rows, PRODUCT.rows), cdiv(cols, PRODUCT.block_cols)
    programs = min(device_properties(device).multiprocessors, tiles_of(rows, cols))
    options = dict(num_warps=4)
    launch = DescribedLaunch(
        kernel, (programs,), device, (*sizes, *scalars), options, CONFIG=config
    )
    panel = (PRODUCT.block_cols, SLICE) if config.COLS_FIRST else (SLICE, PRODUCT.block_cols)
    of_c: Callable = in_tiles(PRODUCT.rows, PRODUCT.part_cols)
    launch.descriptors = (in_tiles(PRODUCT.rows, SLICE), in_tiles(*panel), *[of_c] * stored)
    return launch
