"""Triton kernels of the backward pass for rows that do not fit in registers.

dx reads the row twice, the second time from the L2 cache; dweight and dbias are summed by tiles of
columns, into partial sums that add_parts_kernel adds in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import row_offset
from .kernels import activated, affine_weight
from .tiles_backward import column_sums, gate_slope, store_parts


@triton.jit
def norm_backward_wide_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    y_ptr,
    weight_offset,
    dy_inner_rows,
    dy_outer_stride,
    dy_inner_stride,
    dsum_inner_rows,
    dsum_outer_stride,
    dsum_inner_stride,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    rows,
    cols: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes dx and dgate of one row that does not fit in registers, BLOCK_COLS
    columns at a time, twice over.
    """
    row = tl.program_id(0)
    x_row = x_ptr + row_offset(row, x_inner_rows, x_outer_stride, x_inner_stride)
    dy_row = dy_ptr + row_offset(row, dy_inner_rows, dy_outer_stride, dy_inner_stride)
    gate_row = gate_ptr
    dgate_row = dgate_ptr
    if ACTIVATION != "":
        gate_row += row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride)
        dgate_row += row.to(tl.int64) * cols
    lane = tl.arange(0, BLOCK_COLS)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)

    along = tl.zeros([BLOCK_COLS], tl.float32)
    across = tl.zeros([BLOCK_COLS], tl.float32)
    for start in range(0, cols, BLOCK_COLS):
        col = start + lane
        weight = affine_weight(weight_ptr, col, col < cols, weight_offset)
        x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
        dx_hat = tl.load(dy_row + col, mask=col < cols, other=0.0).to(tl.float32) * weight
        if ACTIVATION != "":
            gate = tl.load(gate_row + col, mask=col < cols, other=0.0).to(tl.float32)
            dgate = (x - mean) * rstd * dx_hat * gate_slope(gate, ACTIVATION)
            tl.store(dgate_row + col, dgate.to(dgate_ptr.dtype.element_ty), mask=col < cols)
            dx_hat *= activated(gate, ACTIVATION)
        along += (x - mean) * rstd * dx_hat
        across += dx_hat
    along = tl.sum(along) / cols
    across = tl.sum(across) / cols

    for start in range(0, cols, BLOCK_COLS):
        col = start + lane
        weight = affine_weight(weight_ptr, col, col < cols, weight_offset)
        x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
        dx_hat = tl.load(dy_row + col, mask=col < cols, other=0.0).to(tl.float32) * weight
        if ACTIVATION != "":
            gate = tl.load(gate_row + col, mask=col < cols, other=0.0).to(tl.float32)
            dx_hat *= activated(gate, ACTIVATION)
        x_hat = (x - mean) * rstd
        dx = dx_hat - x_hat * along
        if mean_ptr is not None:
            dx -= across
        dx *= rstd
        if dsum_ptr is not None:
            dsum_offset = row_offset(row, dsum_inner_rows, dsum_outer_stride, dsum_inner_stride)
            dx += tl.load(dsum_ptr + dsum_offset + col, mask=col < cols, other=0.0).to(tl.float32)
        out = row.to(tl.int64) * cols + col
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)
        if y_ptr is not None:
            y = x_hat * weight
            if bias_ptr is not None:
                y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
            tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def weight_parts_kernel(
    dy_ptr,
    x_ptr,
    gate_ptr,
    mean_ptr,
    rstd_ptr,
    parts_ptr,
    dy_inner_rows,
    dy_outer_stride,
    dy_inner_stride,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    rows,
    cols: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program adds up dweight and dbias of BLOCK_COLS columns over a part of the rows."""
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    x = x_ptr, (x_inner_rows, x_outer_stride, x_inner_stride)
    dy = dy_ptr, (dy_inner_rows, dy_outer_stride, dy_inner_stride)
    gate = gate_ptr, (gate_inner_rows, gate_outer_stride, gate_inner_stride)
    dweight, dbias = column_sums(
        *(x, dy, gate, mean_ptr, rstd_ptr, tl.program_id(0), tl.num_programs(0), col, rows, cols),
        *(WEIGHT_GRAD, BIAS_GRAD, ACTIVATION, BLOCK_ROWS, BLOCK_COLS),
    )
    store_parts(parts_ptr, dweight, dbias, col, cols, WEIGHT_GRAD, BIAS_GRAD)
