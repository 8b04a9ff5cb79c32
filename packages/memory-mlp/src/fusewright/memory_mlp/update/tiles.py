"""Device functions of the pooled update's kernels: tiles of products, operands, sums in a fixed
order.

A problem is one memory with its N rows. Matrix operands are in the keys' dtype (fp32 ones of TF32
products are rounded to it when they are stored); every sum is fp32. Neighbouring programs share the
rows that they read. A TF32 product adds along contiguous numbers: where it adds over rows, its
operands are stored transposed too, [cols, rows].

``CONFIG`` is a ``ProductConfig`` or an ``ElementConfig`` of launch.py, a tile a ``Tile``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._core.tiles import as_operand, to_tf32
from ..common.tiles import add_product, zeros

# How many sums of columns, and how many numbers, are added at once.
SUMS_AT_ONCE = tl.constexpr(16)
PARTIALS_AT_ONCE = tl.constexpr(256)
# Rows of a transposed operand are padded with zeros to a multiple of this.
ROW_MULTIPLE = tl.constexpr(16)


class Tile(NamedTuple):
    """A tile of a problem's matrix.

    Attributes:
        problem: which one.
        row_tile, col_tile: which of its tiles of rows and of columns.
        row, col: [BLOCK_M] and [BLOCK_N], the tile's rows and columns.
        first: its first row among the rows of all problems, in 64 bits.
    """

    problem: Any
    row_tile: Any
    col_tile: Any
    row: Any
    first: Any
    col: Any


@triton.jit
def after_the_launch_before(CONFIG: tl.constexpr):
    """Wait until the launch before has written its results. With ``OVERLAPS`` the program may have
    been placed before that launch ended, and now lets the next one be placed.
    """
    if CONFIG.OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def product_operand(x, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """An fp32 tile as it enters a product of this precision."""
    if CONFIG.PRECISION == "tf32":
        x = to_tf32(x)
    return as_operand(x, DTYPE, CONFIG.UPCAST)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def tile_of_program(rows, cols, CONFIG: tl.constexpr):
    """The ``Tile`` of a problem's [rows, cols] that a program computes, after the launch before."""
    after_the_launch_before(CONFIG)
    row_tiles = tl.cdiv(rows, CONFIG.BLOCK_M)
    col_tiles = tl.cdiv(cols, CONFIG.BLOCK_N)
    tile = tl.program_id(0)
    problem = tile // (row_tiles * col_tiles)
    row_tile, col_tile = tile // col_tiles % row_tiles, tile % col_tiles
    row = row_tile * CONFIG.BLOCK_M + tl.arange(0, CONFIG.BLOCK_M)
    first = problem.to(tl.int64) * rows + row_tile * CONFIG.BLOCK_M
    col = col_tile * CONFIG.BLOCK_N + tl.arange(0, CONFIG.BLOCK_N)
    return Tile(problem, row_tile, col_tile, row, first, col)


@triton.jit
def exists(tile, rows, cols):
    """Which numbers of a tile there are. Asked after a product: masks would be held during it."""
    return (tile.row < rows)[:, None] & (tile.col < cols)[None, :]


@triton.jit
def start_of_problem(problem, inner, outer_stride, inner_stride):
    """Where the rows of a problem begin, whose leading axes take up to two strides."""
    outer = (problem // inner).to(tl.int64) * outer_stride
    return outer + (problem % inner).to(tl.int64) * inner_stride


@triton.jit
def row_major(x_ptr, tile, rows, stride, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The first BLOCK columns of each row of a tile; beyond the last row, of the last: they reach
    nothing that is stored.
    """
    first = tile * BLOCK_ROWS
    row = tl.minimum(tl.arange(0, BLOCK_ROWS), rows - 1 - first)
    corner = x_ptr + first.to(tl.int64) * stride
    return corner + (row[:, None] * stride + tl.arange(0, BLOCK)[None, :])


@triton.jit
def column_major(x_ptr, col, stride, BLOCK: tl.constexpr):
    """The first BLOCK rows of each column, as they lie."""
    return x_ptr + (tl.arange(0, BLOCK)[:, None] * stride + col[None, :])


@triton.jit
def padded_rows(rows):
    """The length of a row of a transposed operand."""
    return tl.cdiv(rows, ROW_MULTIPLE) * ROW_MULTIPLE


@triton.jit
def store_transposed(x_ptr, x, problem, row, col, rows, cols, stride):
    """Store a tile of a problem's x [rows, cols] as [cols, rows], padded with zeros."""
    x = tl.where((row < rows)[:, None], x, 0.0)
    at = (problem.to(tl.int64) * cols + col)[None, :] * stride + row[:, None]
    tl.store(x_ptr + at, x, mask=(row < stride)[:, None] & (col < cols)[None, :])


@triton.jit
def store_operand(x_ptr, transposed_ptr, x, tile, rows, cols, CONFIG: tl.constexpr):
    """Store a tile of a problem's x [rows, cols], rounded, and its transpose where that is kept."""
    x = product_operand(x, x_ptr.dtype.element_ty, CONFIG)
    x_at = elements_of_tile(x_ptr, tile, rows, cols, CONFIG)
    tl.store(x_at, x, mask=exists(tile, rows, cols))
    if transposed_ptr is not None:
        store_transposed(
            transposed_ptr, x, tile.problem, tile.row, tile.col, rows, cols, padded_rows(rows)
        )


@triton.jit
def within_range(x, DTYPE: tl.constexpr):
    """x, where it is beyond the range of float16 its largest number, at which act' and act'' are
    what they are beyond.
    """
    if DTYPE.is_fp16():
        x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def store_rounded(x_ptr, x, tile, rows, cols, CONFIG: tl.constexpr):
    """Store a tile of x [problems, rows, cols], rounded to its dtype: no product reads it."""
    x = as_operand(x, x_ptr.dtype.element_ty, CONFIG.UPCAST)
    at = elements_of_tile(x_ptr, tile, rows, cols, CONFIG)
    tl.store(at, x, mask=exists(tile, rows, cols))


@triton.jit
def load_rounded(x_ptr, tile, rows, cols, CONFIG: tl.constexpr):
    """A tile of x [problems, rows, cols] in fp32, zero outside."""
    at = elements_of_tile(x_ptr, tile, rows, cols, CONFIG)
    return tl.load(at, mask=exists(tile, rows, cols), other=0.0).to(tl.float32)


@triton.jit
def elements_of_tile(x_ptr, tile, rows, cols, CONFIG: tl.constexpr):
    """The elements of a tile of a contiguous x [problems, rows, cols]."""
    return elements_from(x_ptr, tile.first, cols, tile.col, CONFIG)


@triton.jit
def elements_from(x_ptr, first, stride, col, CONFIG: tl.constexpr):
    """The elements of a tile from row ``first`` (64 bits) on; offsets within it have 32."""
    corner = x_ptr + first * stride
    return corner + (tl.arange(0, CONFIG.BLOCK_M)[:, None] * stride + col[None, :])


@triton.jit
def load_bias(x_ptr, tile, cols):
    """The columns of a tile of a problem's x [cols], as one row."""
    return tl.load(
        x_ptr + tile.problem.to(tl.int64) * cols + tile.col, mask=tile.col < cols, other=0.0
    )[None, :]


@triton.jit
def residual_of(output, b2_ptr, v_at, tile, inside, width, CONFIG: tl.constexpr):
    """M(k) - v of a tile, from h w2^T; ``v_at`` is v with its strides, as in ``UpdateProblem``."""
    v_ptr, inner, outer_stride, inner_stride, row_stride = v_at
    r = output + load_bias(b2_ptr, tile, width)
    v_ptr += start_of_problem(tile.problem, inner, outer_stride, inner_stride)
    first = (tile.row_tile * CONFIG.BLOCK_M).to(tl.int64)
    at = elements_from(v_ptr, first, row_stride, tile.col, CONFIG)
    r -= tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, r, 0.0)


@triton.jit
def load_row_weights(row_weights_ptr, tile, rows):
    """Those of a tile's rows, as one column."""
    at = row_weights_ptr + tile.problem.to(tl.int64) * rows + tile.row
    return tl.load(at, mask=tile.row < rows, other=0.0)[:, None]


@triton.jit
def load_left(at, start, depth, CONFIG: tl.constexpr):
    """Columns ``start``, ``start + 1``, ... of a left operand."""
    if CONFIG.EVEN:
        x = tl.load(at + start)
    else:
        left = start + tl.arange(0, CONFIG.BLOCK_K) < depth
        x = tl.load(at + start, mask=left[None, :], other=0.0)
    return x


@triton.jit
def load_right(at, start, depth, col, cols, stride, TRANSPOSED: tl.constexpr, CONFIG: tl.constexpr):
    """Rows ``start``, ``start + 1``, ... of a right operand: its columns lie one after the other
    with ``TRANSPOSED`` (``row_major``), its rows otherwise (``column_major``).
    """
    if TRANSPOSED:
        x = tl.trans(load_left(at, start, depth, CONFIG))
    else:
        inside = (col < cols)[None, :]
        if not CONFIG.EVEN:
            inside = inside & (start + tl.arange(0, CONFIG.BLOCK_K) < depth)[:, None]
        x = tl.load(at + tl.cast(start, tl.int64) * stride, mask=inside, other=0.0)
    return x


@triton.jit
def left_operand(x_ptr, tile, rows, stride, CONFIG: tl.constexpr):
    """The first columns of a tile's rows."""
    return row_major(x_ptr, tile.row_tile, rows, stride, CONFIG.BLOCK_M, CONFIG.BLOCK_K)


@triton.jit
def right_operand(x_ptr, tile, cols, depth, TRANSPOSED: tl.constexpr, CONFIG: tl.constexpr):
    """The first rows of a tile's columns of its problem's x [depth, cols], or of [cols, depth]."""
    if TRANSPOSED:
        at = row_major(x_ptr, tile.col_tile, cols, depth, CONFIG.BLOCK_N, CONFIG.BLOCK_K)
    else:
        at = column_major(x_ptr, tile.col, cols, CONFIG.BLOCK_K)
    return at


@triton.jit
def product(
    a_ptr, a_stride, b_ptr, tile, rows, cols, depth, TRANSPOSED: tl.constexpr, CONFIG: tl.constexpr
):
    """A tile of a b: a [rows, depth] as it lies in its problem, b [depth, cols], or with
    ``TRANSPOSED`` [cols, depth], of all problems.
    """
    matrix = tile.problem.to(tl.int64) * cols * depth
    a_at = left_operand(a_ptr, tile, rows, a_stride, CONFIG)
    b_at = right_operand(b_ptr + matrix, tile, cols, depth, TRANSPOSED, CONFIG)
    acc = zeros(CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    for start in tl.range(0, depth, CONFIG.BLOCK_K, num_stages=CONFIG.NUM_STAGES):
        a = load_left(a_at, start, depth, CONFIG)
        b = load_right(b_at, start, depth, tile.col, cols, cols, TRANSPOSED, CONFIG)
        acc = add_product(acc, a, b, CONFIG)
    return acc


@triton.jit
def two_products(
    pairs, tile, rows, cols, depth, CROSS: tl.constexpr, TRANSPOSED: tl.constexpr, CONFIG
):
    """Tiles of a b + c d and, with ``CROSS``, of a d, whose operands are loaded anyway: a and c
    [rows, depth], b and d as in ``product``, of all problems.
    """
    a_ptr, b_ptr, c_ptr, d_ptr = pairs
    first = tile.problem.to(tl.int64) * rows * depth
    matrix = tile.problem.to(tl.int64) * cols * depth
    a_at = left_operand(a_ptr + first, tile, rows, depth, CONFIG)
    b_at = right_operand(b_ptr + matrix, tile, cols, depth, TRANSPOSED, CONFIG)
    c_at = left_operand(c_ptr + first, tile, rows, depth, CONFIG)
    d_at = right_operand(d_ptr + matrix, tile, cols, depth, TRANSPOSED, CONFIG)
    acc = zeros(CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    cross = zeros(CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    for start in tl.range(0, depth, CONFIG.BLOCK_K, num_stages=CONFIG.NUM_STAGES):
        a = load_left(a_at, start, depth, CONFIG)
        b = load_right(b_at, start, depth, tile.col, cols, cols, TRANSPOSED, CONFIG)
        acc = add_product(acc, a, b, CONFIG)
        c = load_left(c_at, start, depth, CONFIG)
        d = load_right(d_at, start, depth, tile.col, cols, cols, TRANSPOSED, CONFIG)
        acc = add_product(acc, c, d, CONFIG)
        if CROSS:
            cross = add_product(cross, a, d, CONFIG)
    return acc, cross


@triton.jit
def store_column_sums(sums_ptr, x, tile, rows, cols, CONFIG: tl.constexpr):
    """The sum of each column of a tile, in its place among the tiles of rows."""
    row_tiles = tl.cdiv(rows, CONFIG.BLOCK_M)
    at = (tile.problem.to(tl.int64) * row_tiles + tile.row_tile) * cols + tile.col
    tl.store(sums_ptr + at, tl.sum(x, 0), mask=tile.col < cols)


@triton.jit
def sum_of_tiles(sums_ptr, problem, row_tiles, col, cols, BLOCK: tl.constexpr):
    """The sums that ``store_column_sums`` wrote, added in the order of the rows."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    start = problem.to(tl.int64) * row_tiles
    for first in tl.range(0, row_tiles, SUMS_AT_ONCE):
        tile = first + tl.arange(0, SUMS_AT_ONCE)
        inside = (tile < row_tiles)[:, None] & (col < cols)[None, :]
        at = (start + tile)[:, None] * cols + col[None, :]
        total += tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), 0)
    return total


@triton.jit
def sum_of_partials(partials_ptr, problem, count):
    """The sum of ``count`` numbers of a problem: all programs compute the same bits."""
    total = tl.zeros([PARTIALS_AT_ONCE], dtype=tl.float32)
    start = problem.to(tl.int64) * count
    for first in tl.range(0, count, PARTIALS_AT_ONCE):
        at = first + tl.arange(0, PARTIALS_AT_ONCE)
        total += tl.load(partials_ptr + start + at, mask=at < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def part_of_program(tile, width, hidden, BLOCK: tl.constexpr):
    """Which tensor of a MemoryWeights a block of elements belongs to (0: w1, 1: w2, 2: b1, 3: b2),
    and the block's first element there. The blocks of w1 come first, then those of w2, b1 and b2.
    """
    matrix_tiles = tl.cdiv(tl.cast(hidden, tl.int64) * width, BLOCK).to(tl.int32)
    past_w2 = tile - 2 * matrix_tiles
    past_b1 = past_w2 - tl.cdiv(hidden, BLOCK)
    part = tl.where(tile < matrix_tiles, 0, 1)
    part = tl.where(past_w2 >= 0, tl.where(past_b1 >= 0, 3, 2), part)
    block = tl.where(part == 3, past_b1, tl.where(part == 2, past_w2, tile - part * matrix_tiles))
    return part, block.to(tl.int64) * BLOCK
