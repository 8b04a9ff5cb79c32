"""Device functions that the kernels of several families call: tiles of rows and their products."""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import product_in_order

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr = None):
    """A tile of fp32. Triton takes no field of a record of constants into a list."""
    SHAPE: tl.constexpr = [ROWS] if COLUMNS is None else [ROWS, COLUMNS]
    return tl.zeros(SHAPE, tl.float32)


@triton.jit
def load_rows(x_ptr, first, limit, row_stride, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """Rows ``first``, ``first + 1``, ... of a matrix with contiguous rows; zeros from ``limit``
    on.
    """
    row, col = tl.arange(0, ROWS), tl.arange(0, CONFIG.BLOCK_D)
    corner = x_ptr + tl.cast(first, tl.int64) * row_stride
    at = corner + (row[:, None] * row_stride + col[None, :])
    return tl.load(at, mask=(first + row < limit)[:, None] & (col < CONFIG.D)[None, :], other=0.0)


@triton.jit
def load_ranges(ranges_ptr, row, inside):
    """Of each row the first key that it may see, and the one behind the last; none of a row that is
    not ``inside``. So of tiles of keys and the rows that may see them.
    """
    first = tl.load(ranges_ptr + 2 * row, mask=inside, other=0)
    return first, tl.load(ranges_ptr + 2 * row + 1, mask=inside, other=0)


@triton.jit
def range_of_tile(first, last):
    """From the first to behind the last key that any of these rows may see."""
    some = first < last
    return tl.min(tl.where(some, first, 0x7FFFFFFF), 0), tl.max(tl.where(some, last, 0), 0)


@triton.jit
def is_in_range(key, of_rows):
    """Which of these keys each row may see, [rows, keys]."""
    first, last = of_rows
    return (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])


@triton.jit
def product(a, b, CONFIG: tl.constexpr):
    """a b in fp32."""
    # Triton 3.6 hands no string of a record on to another function.
    PRECISION: tl.constexpr = CONFIG.PRECISION
    return product_in_order(a, b, CONFIG.UPCAST, PRECISION)


@triton.jit
def product_with_rows(a, b, CONFIG: tl.constexpr):
    """a b^T, for a loop in which b changes. fp32 tiles that no tensor core takes are multiplied
    from registers: a stays in them for the whole loop where it stands on the left, and not on the
    right.
    """
    if a.dtype == tl.float32 and CONFIG.PRECISION == "ieee":
        ab = tl.trans(product(b, tl.trans(a), CONFIG))
    else:
        ab = product(a, tl.trans(b), CONFIG)
    return ab
