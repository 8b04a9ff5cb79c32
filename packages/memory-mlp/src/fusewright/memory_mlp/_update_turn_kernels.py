"""Triton kernel that turns and rounds what TF32 products read.

A card multiplies fp32 tiles in TF32 only where both walk along contiguous numbers. Sums over rows
therefore read k, e and h as [width or hidden, rows], and products from the right read transposed
weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._update_tiles import (
    after_the_launch_before,
    start_of_problem,
    store_turned,
    to_tf32,
    turned_rows,
)


@triton.jit
def turn(
    x_ptr,
    straight_ptr,
    turned_ptr,
    problem,
    tile,
    rows,
    cols,
    row_stride,
    turned_row_stride,
    BLOCK: tl.constexpr,
):
    """A tile of one problem's x [rows, cols], rounded: as it lies and turned, where asked."""
    col_tiles = tl.cdiv(cols, BLOCK)
    row = tile // col_tiles * BLOCK + tl.arange(0, BLOCK)
    col = tile % col_tiles * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + col[None, :]
    x = to_tf32(tl.load(x_ptr + at, mask=inside, other=0.0))
    if straight_ptr is not None:
        at = (problem.to(tl.int64) * rows + row)[:, None] * cols + col[None, :]
        tl.store(straight_ptr + at, x, mask=inside)
    if turned_ptr is not None:
        store_turned(turned_ptr, x, problem, row, col, rows, cols, turned_row_stride)


@triton.jit
def _turn_kernel(
    k_ptr,
    w1_ptr,
    w2_ptr,
    e_ptr,
    h_ptr,
    a1_ptr,
    a2_ptr,
    k_out_ptr,
    k_turned_ptr,
    w1_out_ptr,
    w1_turned_ptr,
    w2_out_ptr,
    w2_turned_ptr,
    e_turned_ptr,
    h_turned_ptr,
    a1_turned_ptr,
    a2_turned_ptr,
    k_inner,
    k_outer_stride,
    k_inner_stride,
    k_row_stride,
    rows,
    width,
    hidden,
    programs,
    BACKWARD: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program takes a tile of one matrix: of w1, w2 and k, backward also of A, e and h."""
    after_the_launch_before(OVERLAPS)
    problem = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs
    weight_tiles = tl.cdiv(hidden, BLOCK) * tl.cdiv(width, BLOCK)
    k_tiles = tl.cdiv(rows, BLOCK) * tl.cdiv(width, BLOCK)
    stride = turned_rows(rows)
    matrix = problem.to(tl.int64) * hidden * width
    if tile < weight_tiles:
        turn(
            w1_ptr + matrix,
            w1_out_ptr,
            w1_turned_ptr,
            problem,
            tile,
            hidden,
            width,
            width,
            hidden,
            BLOCK,
        )
    elif tile < 2 * weight_tiles:
        turn(
            w2_ptr + matrix,
            w2_out_ptr,
            w2_turned_ptr,
            problem,
            tile - weight_tiles,
            width,
            hidden,
            hidden,
            width,
            BLOCK,
        )
    elif tile < 2 * weight_tiles + k_tiles:
        turn(
            k_ptr + start_of_problem(problem, k_inner, k_outer_stride, k_inner_stride),
            k_out_ptr,
            k_turned_ptr,
            problem,
            tile - 2 * weight_tiles,
            rows,
            width,
            k_row_stride,
            stride,
            BLOCK,
        )
    elif BACKWARD:
        tile -= 2 * weight_tiles + k_tiles
        first = problem.to(tl.int64) * rows
        if tile < weight_tiles:
            turn(
                a1_ptr + matrix,
                None,
                a1_turned_ptr,
                problem,
                tile,
                hidden,
                width,
                width,
                hidden,
                BLOCK,
            )
        elif tile < 2 * weight_tiles:
            turn(
                a2_ptr + matrix,
                None,
                a2_turned_ptr,
                problem,
                tile - weight_tiles,
                width,
                hidden,
                hidden,
                width,
                BLOCK,
            )
        elif tile < 2 * weight_tiles + k_tiles:
            turn(
                e_ptr + first * width,
                None,
                e_turned_ptr,
                problem,
                tile - 2 * weight_tiles,
                rows,
                width,
                width,
                stride,
                BLOCK,
            )
        else:
            turn(
                h_ptr + first * hidden,
                None,
                h_turned_ptr,
                problem,
                tile - (2 * weight_tiles + k_tiles),
                rows,
                hidden,
                hidden,
                stride,
                BLOCK,
            )
