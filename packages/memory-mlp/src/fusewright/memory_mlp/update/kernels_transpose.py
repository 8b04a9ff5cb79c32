"""Triton kernel that transposes and rounds the operands of TF32 products.

A GPU multiplies fp32 tiles in TF32 only where both add along contiguous numbers. Sums over rows
therefore read k, e and h as [width or hidden, rows], and products from the right read transposed
weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import to_tf32
from .tiles import (
    after_the_launch_before,
    padded_rows,
    start_of_problem,
    store_transposed,
)


@triton.jit
def transpose_tile(tensors, problem, tile, rows, cols, row_stride, transposed_row_stride, BLOCK):
    """Store a tile of one problem's x [rows, cols], rounded: as it is and as its transpose, each
    where its pointer is not None.
    """
    x_ptr, out_ptr, transposed_ptr = tensors
    col_tiles = tl.cdiv(cols, BLOCK)
    row = tile // col_tiles * BLOCK + tl.arange(0, BLOCK)
    col = tile % col_tiles * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + col[None, :]
    x = to_tf32(tl.load(x_ptr + at, mask=inside, other=0.0))
    if out_ptr is not None:
        at = (problem.to(tl.int64) * rows + row)[:, None] * cols + col[None, :]
        tl.store(out_ptr + at, x, mask=inside)
    if transposed_ptr is not None:
        store_transposed(transposed_ptr, x, problem, row, col, rows, cols, transposed_row_stride)


@triton.jit
def transpose_kernel(
    k_ptr,
    w1_ptr,
    w2_ptr,
    e_ptr,
    h_ptr,
    a1_ptr,
    a2_ptr,
    k_out_ptr,
    k_transposed_ptr,
    w1_out_ptr,
    w1_transposed_ptr,
    w2_out_ptr,
    w2_transposed_ptr,
    e_transposed_ptr,
    h_transposed_ptr,
    a1_transposed_ptr,
    a2_transposed_ptr,
    k_inner,
    k_outer_stride,
    k_inner_stride,
    k_row_stride,
    rows,
    width,
    hidden,
    programs,
    CONFIG: tl.constexpr,
):
    """One program takes a tile of one matrix: of w1, w2 and k, backward also of A, e and h."""
    BLOCK: tl.constexpr = CONFIG.BLOCK
    after_the_launch_before(CONFIG)
    problem = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs
    weight_tiles = tl.cdiv(hidden, BLOCK) * tl.cdiv(width, BLOCK)
    k_tiles = tl.cdiv(rows, BLOCK) * tl.cdiv(width, BLOCK)
    stride = padded_rows(rows)
    matrix = problem.to(tl.int64) * hidden * width
    if tile < weight_tiles:
        w1 = w1_ptr + matrix, w1_out_ptr, w1_transposed_ptr
        transpose_tile(w1, problem, tile, hidden, width, width, hidden, BLOCK)
    elif tile < 2 * weight_tiles:
        w2 = w2_ptr + matrix, w2_out_ptr, w2_transposed_ptr
        transpose_tile(w2, problem, tile - weight_tiles, width, hidden, hidden, width, BLOCK)
    elif tile < 2 * weight_tiles + k_tiles:
        k_ptr += start_of_problem(problem, k_inner, k_outer_stride, k_inner_stride)
        k = k_ptr, k_out_ptr, k_transposed_ptr
        tile -= 2 * weight_tiles
        transpose_tile(k, problem, tile, rows, width, k_row_stride, stride, BLOCK)
    elif a1_ptr is not None:
        tile -= 2 * weight_tiles + k_tiles
        first = problem.to(tl.int64) * rows
        if tile < weight_tiles:
            a1 = a1_ptr + matrix, None, a1_transposed_ptr
            transpose_tile(a1, problem, tile, hidden, width, width, hidden, BLOCK)
        elif tile < 2 * weight_tiles:
            a2 = a2_ptr + matrix, None, a2_transposed_ptr
            transpose_tile(a2, problem, tile - weight_tiles, width, hidden, hidden, width, BLOCK)
        elif tile < 2 * weight_tiles + k_tiles:
            e = e_ptr + first * width, None, e_transposed_ptr
            transpose_tile(e, problem, tile - 2 * weight_tiles, rows, width, width, stride, BLOCK)
        else:
            h = h_ptr + first * hidden, None, h_transposed_ptr
            tile -= 2 * weight_tiles + k_tiles
            transpose_tile(h, problem, tile, rows, hidden, hidden, stride, BLOCK)
