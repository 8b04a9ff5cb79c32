"""What the kernels of the backward pass share: loads, row means and sums over rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import row_offset
from .kernels import activated


@triton.jit
def load_wide(pointers, inside, EVICTION: tl.constexpr):
    """What is at the pointers in fp32, 0 outside the rows."""
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def normalized(x, mean, rstd, inside, CENTER: tl.constexpr, EVICTION: tl.constexpr):
    """(x - mean) * rstd of the elements at the pointers x, 0 outside the rows."""
    centered = load_wide(x, inside, EVICTION)
    if CENTER:
        centered = tl.where(inside, centered - mean, 0.0)
    return centered * rstd


@triton.jit
def row_means(x_hat, dx_hat, cols, CENTER: tl.constexpr):
    """mean(x_hat * dx_hat) of each row and, for a centred norm, mean(dx_hat), else 0."""
    along = tl.sum(x_hat * dx_hat, 1)[:, None] / cols
    across = 0.0
    if CENTER:
        across = tl.sum(dx_hat, 1)[:, None] / cols
    return along, across


@triton.jit
def gate_slope(gate, ACTIVATION: tl.constexpr):
    """The derivative of what a gate multiplies by."""
    factor = tl.sigmoid(gate)
    if ACTIVATION == "silu":
        return factor * (1.0 + gate * (1.0 - factor))
    else:
        return factor * (1.0 - factor)


@triton.jit
def column_sums(
    dy_ptr,
    x_ptr,
    gate_ptr,
    mean_ptr,
    rstd_ptr,
    dy_inner_rows,
    dy_outer_stride,
    dy_inner_stride,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    first,
    step,
    col,
    rows,
    cols,
    CENTER: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """dy * x_hat and dy of the columns ``col``, added over every step-th block of rows; dy is what
    passes the gate, where there is one.
    """
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for block in range(first, tl.cdiv(rows, BLOCK_ROWS), step):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        dy_offset = row_offset(row, dy_inner_rows, dy_outer_stride, dy_inner_stride)
        dy = load_wide(dy_ptr + dy_offset[:, None] + col[None, :], inside, "")
        if ACTIVATION != "":
            gate_offset = row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride)
            gate = load_wide(gate_ptr + gate_offset[:, None] + col[None, :], inside, "")
            dy *= activated(gate, ACTIVATION)
        if WEIGHT_GRAD:
            rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
            mean = 0.0
            if CENTER:
                mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
            x_offset = row_offset(row, x_inner_rows, x_outer_stride, x_inner_stride)
            x = x_ptr + x_offset[:, None] + col[None, :]
            dweight += dy * normalized(x, mean, rstd, inside, CENTER, "")
        if BIAS_GRAD:
            dbias += dy
    return dweight, dbias


@triton.jit
def store_parts(
    parts_ptr, dweight, dbias, col, cols, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr
):
    """Write this program's partial sums: parts is [2, programs, cols], dweight first."""
    if WEIGHT_GRAD:
        part = parts_ptr + tl.program_id(0) * cols + col
        tl.store(part, tl.sum(dweight, 0), mask=col < cols)
    if BIAS_GRAD:
        part = parts_ptr + (tl.num_programs(0) + tl.program_id(0)) * cols + col
        tl.store(part, tl.sum(dbias, 0), mask=col < cols)
