"""Triton kernels of a linear layer whose rows are in groups, each with a weight of its own.

    y_r = W_g x_r          for rows r of group g: up to ends[g], from the end of the one before
    dx_r = W_g^T dy_r,  dW_g = sum over the group's rows of dy_r x_r^T

Where groups end is read on the GPU. A tile of rows is of one group, so there are up to as many
tiles more than whole ones as there are groups, and the rows behind the last group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand, product_in_order


@triton.jit
def group_of_tile(ends_ptr, tile, rows, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The group of a tile, its first row and the end of the group. Rows behind the last group are
    of a group GROUPS; a tile behind all of them begins where it ends, or later.
    """
    begin = tile * 0
    group, first, end = begin + GROUPS, begin + rows, begin + rows
    for number in range(GROUPS):
        stop = tl.load(ends_ptr + number)
        stop = tl.minimum(tl.maximum(stop, begin), rows).to(tl.int32)
        tiles = tl.cdiv(stop - begin, BLOCK_ROWS)
        here = (tile >= 0) & (tile < tiles)
        group = tl.where(here, number, group)
        first = tl.where(here, begin + tile * BLOCK_ROWS, first)
        end = tl.where(here, stop, end)
        tile -= tiles
        begin = stop
    return group, tl.where(tile >= 0, begin + tile * BLOCK_ROWS, first), end


@triton.jit
def rows_of_group(ends_ptr, group, rows, GROUPS: tl.constexpr):
    """The first row of a group and the one behind its last."""
    begin, end, stop = group * 0, group * 0, group * 0
    for number in range(GROUPS):
        before = stop
        stop = tl.load(ends_ptr + number)
        stop = tl.minimum(tl.maximum(stop, before), rows).to(tl.int32)
        begin = tl.where(group == number, before, begin)
        end = tl.where(group == number, stop, end)
    return begin, end


@triton.jit
def grouped_product_kernel(
    x_ptr,
    weight_ptr,
    ends_ptr,
    y_ptr,
    rows,
    INNER: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLS_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes BLOCK_ROWS rows of one group and BLOCK_COLS columns of y [rows, COLS],
    sums over INNER columns of x. A group's weight lies as [COLS, INNER] where COLS_FIRST, else as
    [INNER, COLS].
    """
    blocks: tl.constexpr = (COLS + BLOCK_COLS - 1) // BLOCK_COLS
    tile = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    group, first, end = group_of_tile(ends_ptr, tile, rows, GROUPS, BLOCK_ROWS)
    row = first + tl.arange(0, BLOCK_ROWS)
    of_row = row.to(tl.int64)[:, None]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    matrix = weight_ptr + group.to(tl.int64) * (COLS * INNER)
    if (group < GROUPS) & (first < end):
        for start in tl.range(0, INNER, BLOCK_INNER, num_stages=NUM_STAGES):
            inner = start + tl.arange(0, BLOCK_INNER)
            inside = (row < end)[:, None] & (inner < INNER)[None, :]
            x = tl.load(x_ptr + of_row * INNER + inner[None, :], mask=inside, other=0.0)
            if COLS_FIRST:
                at = col[None, :] * INNER + inner[:, None]
            else:
                at = inner[:, None] * COLS + col[None, :]
            inside = (inner < INNER)[:, None] & (col < COLS)[None, :]
            weight = tl.load(matrix + at, mask=inside, other=0.0)
            sums += product_in_order(x, weight, UPCAST, "ieee")
    y = as_operand(sums, y_ptr.dtype.element_ty, UPCAST)
    inside = (row < end)[:, None] & (col < COLS)[None, :]
    tl.store(y_ptr + of_row * COLS + col[None, :], y, mask=inside)


@triton.jit
def grouped_weight_kernel(
    dy_ptr,
    x_ptr,
    ends_ptr,
    dweight_ptr,
    rows,
    INNER: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program computes BLOCK_COLS rows and BLOCK_INNER columns of one group's dweight [COLS,
    INNER], in the order of the rows.
    """
    inner_blocks: tl.constexpr = (INNER + BLOCK_INNER - 1) // BLOCK_INNER
    col_blocks: tl.constexpr = (COLS + BLOCK_COLS - 1) // BLOCK_COLS
    group = tl.program_id(0) // inner_blocks // col_blocks
    col = tl.program_id(0) // inner_blocks % col_blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inner = tl.program_id(0) % inner_blocks * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    begin, end = rows_of_group(ends_ptr, group, rows, GROUPS)
    sums = tl.zeros([BLOCK_COLS, BLOCK_INNER], tl.float32)
    for start in tl.range(begin, end, BLOCK_ROWS, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_ROWS)
        of_row = row.to(tl.int64)
        inside = (col < COLS)[:, None] & (row < end)[None, :]
        dy = tl.load(dy_ptr + of_row[None, :] * COLS + col[:, None], mask=inside, other=0.0)
        inside = (row < end)[:, None] & (inner < INNER)[None, :]
        x = tl.load(x_ptr + of_row[:, None] * INNER + inner[None, :], mask=inside, other=0.0)
        sums += product_in_order(dy, x, UPCAST, "ieee")
    dweight = as_operand(sums, dweight_ptr.dtype.element_ty, UPCAST)
    at = (group.to(tl.int64) * COLS + col)[:, None] * INNER + inner[None, :]
    inside = (col < COLS)[:, None] & (inner < INNER)[None, :]
    tl.store(dweight_ptr + at, dweight, mask=inside)
