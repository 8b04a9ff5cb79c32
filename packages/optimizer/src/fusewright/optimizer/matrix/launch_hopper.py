"""The products of Newton-Schulz on Hopper, of which two of three have symmetric results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
# Columns of a product's first factor in a slice of shared memory; rows of a group of warps.
SLICE = 64


class ProductConfig(NamedTuple):
    """Tiles of ``groups`` groups of warps with ``rows`` rows each and ``block_cols`` columns; a
    ring of ``stages`` slices; so many registers a thread that multiplies and that copies.
    """

    groups: int = 2
    rows: int = 64
    block_cols: int = 256
    stages: int = 4
    registers: int = 232
    copying_registers: int = 24


class ProductConstants(NamedTuple):
    """What the kernel is compiled for, read as ``CONFIG``."""

    GROUPS: int
    ROWS: int
    BLOCK_COLS: int
    STAGES: int
    REGISTERS: int
    COPYING_REGISTERS: int
    ROWS_FIRST: bool
    COLS_FIRST: bool
    STARTS: bool
    SYMMETRIC: bool
    TRANSPOSED: bool


# Source: docs/decisions/0028-products-h200.csv.
PRODUCT = ProductConfig()
# A side of this length or more; shorter ones have too few tiles for symmetry to save any.
SHORTEST = 384
# Bytes that the products of one stack take at most, unless a single matrix takes more.
WORKSPACE = 160 << 20


def serves(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel orthogonalises matrices ``[count, rows, columns]``, in whole tiles."""
    short, long = sorted(shape[1:])
    if dtype not in DTYPES or interpreted() or device.type != "cuda" or short < SHORTEST:
        return False
    whole = short % (PRODUCT.groups * PRODUCT.rows) == 0 and long % SLICE == 0
    return whole and device_properties(device).capability == 90


@functools.lru_cache(maxsize=4096)
def fastest_stack(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> int:
    """Into stacks of how many of these matrices their products are cut to take the least time:
    as many as leave the fewest programs without a tile in the last round of each, within memory.
    """
    count, rows, cols = shape
    short, long = sorted((rows, cols))
    programs = device_properties(device).multiprocessors
    triangle, inside = tiles_of(short, short, True), tiles_of(short, long, False)

    def rounds(some: int) -> int:
        """Times as many terms as each adds."""
        of_symmetric = cdiv(some * triangle, programs) * (long + short)
        return of_symmetric + cdiv(some * inside, programs) * short

    def time(some: int) -> int:
        rest = count % some
        return count // some * rounds(some) + (rounds(rest) if rest else 0)

    most = WORKSPACE // ((2 * short * long + short * short) * dtype.itemsize)
    return min(range(1, max(1, min(most, count)) + 1), key=time)


def tiles_of(rows: int, cols: int, symmetric: bool) -> int:
    """How many tiles of a matrix are computed."""
    tile_rows = PRODUCT.groups * PRODUCT.rows
    row_tiles = cdiv(rows, tile_rows)
    if symmetric:
        return sum(at * tile_rows // PRODUCT.block_cols + 1 for at in range(row_tiles))
    return row_tiles * cdiv(cols, PRODUCT.block_cols)


def chain_on_hopper(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """``newton_schulz.chain`` of contiguous matrices, whose memory it writes to."""
    count, rows, cols = x.shape
    short = min(rows, cols)
    tall = rows > cols
    other, inner = torch.empty_like(x), x.new_empty(count, short, short)
    planned = functools.partial(plan, count, dtype=x.dtype, device=x.device)
    gram_of = planned("gram", short, short, max(rows, cols), tall)
    square = planned("square", short, short, short, False)
    move = planned("move", short, max(rows, cols), short, tall)
    for a, b, c in triples:
        if c:
            # In the memory of the next X, which is written later.
            gram = other.view(-1)[: inner.numel()].view(inner.shape)
            gram_of(x, x, gram, 0.0, 1.0)
            square(gram, gram, inner, b / c, c)
        else:
            gram_of(x, x, inner, 0.0, b)
        move(inner, x, other, a, 1.0)
        x, other = other, x
    return x


@functools.lru_cache(maxsize=4096)
def plan(
    count: int,
    kind: str,
    rows: int,
    cols: int,
    inner: int,
    tall: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Tensor, Tensor, Tensor, float, float], None]:
    """A product of so many matrices c of ``rows`` and ``cols``: X X^T; A A with a multiple of A; or
    B X with a multiple of X. Of tall matrices X is the transpose.
    """
    symmetric = kind != "move"
    rows_first, cols_first = not (tall and kind == "gram"), (kind == "gram") != tall
    tiles_of_matrix = tiles_of(rows, cols, symmetric)
    row_tiles = cdiv(rows, PRODUCT.groups * PRODUCT.rows)
    tiles = count * tiles_of_matrix
    launch = DescribedLaunch(
        kernels_hopper.hopper_product_kernel,
        (min(device_properties(device).multiprocessors, tiles),),
        device,
        (tiles, tiles_of_matrix, row_tiles, rows, cols, cdiv(inner, SLICE)),
        dict(num_warps=4),
        CONFIG=ProductConstants(
            GROUPS=PRODUCT.groups,
            ROWS=PRODUCT.rows,
            BLOCK_COLS=PRODUCT.block_cols,
            STAGES=PRODUCT.stages,
            REGISTERS=PRODUCT.registers,
            COPYING_REGISTERS=PRODUCT.copying_registers,
            ROWS_FIRST=rows_first,
            COLS_FIRST=cols_first,
            STARTS=kind != "gram",
            SYMMETRIC=symmetric,
            TRANSPOSED=tall and kind == "move",
        ),
    )
    of_b = (PRODUCT.block_cols, SLICE) if cols_first else (SLICE, PRODUCT.block_cols)
    launch.descriptors = (in_tiles(SLICE, SLICE), in_tiles(*of_b), in_tiles(SLICE, SLICE))

    def run(a: Tensor, b: Tensor, c: Tensor, start: float, scale: float) -> None:
        launch((a.flatten(0, 1), b.flatten(0, 1), c.flatten(0, 1)), (start, scale))

    return run
