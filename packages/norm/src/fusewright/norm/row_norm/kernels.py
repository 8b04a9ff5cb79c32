"""Triton kernels of the forward pass, shared by rms_norm, add_rms_norm, rms_norm_gated,
layer_norm and add_layer_norm.

They are one formula: layer norms centre the row first (``CENTER``), those that add a residual do
so before, rms_norm_gated multiplies by a gate last (``ACTIVATION``, "" without one); what is
absent has no pointer. Rows up to the width of the launch table stay in registers; wider ones are
walked in blocks, with the second and third walk served by the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import row_offset


@triton.jit
def rows_at(pointer, strides, row, col):
    """Where the columns ``col`` of some rows are."""
    offset = row_offset(row, *strides)
    return pointer + offset[:, None] + col[None, :]


@triton.jit
def load_wide(at, inside, EVICTION: tl.constexpr):
    """What is there in fp32, 0 outside the rows."""
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def affine_weight(weight_ptr, col, within, weight_offset):
    """The factor of each column, offset in fp32; 1 where there is no weight."""
    weight = tl.full(col.shape, 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=within, other=0.0).to(tl.float32) + weight_offset
    return weight


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """What a gate multiplies by."""
    factor = tl.sigmoid(gate)
    if ACTIVATION == "silu":
        factor *= gate
    return factor


@triton.jit
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    weight_offset,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    residual_inner_rows,
    residual_outer_stride,
    residual_inner_stride,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    rows,
    cols: tl.constexpr,
    CENTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVICTION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program normalises BLOCK_ROWS whole rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)
    row_inside = (row < rows) | EVEN_ROWS
    inside = row_inside[:, None] & (col < cols)[None, :]
    out = row.to(tl.int64)[:, None] * cols + col[None, :]

    x_strides = x_inner_rows, x_outer_stride, x_inner_stride
    x = load_wide(rows_at(x_ptr, x_strides, row, col), inside, EVICTION)
    if residual_ptr is not None:
        residual_strides = residual_inner_rows, residual_outer_stride, residual_inner_stride
        residual = load_wide(rows_at(residual_ptr, residual_strides, row, col), inside, EVICTION)
        # What is normalised is the sum as the caller receives it, rounded to its dtype.
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, total, mask=inside)
        x = total.to(tl.float32)
    weight = affine_weight(weight_ptr, col, col < cols, weight_offset)

    if CENTER:
        mean = tl.sum(x, 1) / cols
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row_inside)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / cols + eps)
    y = x * rstd[:, None] * weight[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        gate_strides = gate_inner_rows, gate_outer_stride, gate_inner_stride
        gate = load_wide(rows_at(gate_ptr, gate_strides, row, col), inside, EVICTION)
        y *= activated(gate, ACTIVATION)

    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row_inside)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_forward_wide_kernel(
    x_ptr,
    residual_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    weight_offset,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    residual_inner_rows,
    residual_outer_stride,
    residual_inner_stride,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    rows,
    cols: tl.constexpr,
    CENTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program normalises one row that does not fit in registers, BLOCK_COLS columns
    at a time, two or three times over.
    """
    row = tl.program_id(0)
    x_row = x_ptr + row_offset(row, x_inner_rows, x_outer_stride, x_inner_stride)
    out = row.to(tl.int64) * cols
    lane = tl.arange(0, BLOCK_COLS)

    total = tl.zeros([BLOCK_COLS], tl.float32)
    squares = tl.zeros([BLOCK_COLS], tl.float32)
    for start in range(0, cols, BLOCK_COLS):
        col = start + lane
        x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual_row = residual_ptr + row_offset(
                row, residual_inner_rows, residual_outer_stride, residual_inner_stride
            )
            x += tl.load(residual_row + col, mask=col < cols, other=0.0).to(tl.float32)
            added = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + out + col, added, mask=col < cols)
            x = added.to(tl.float32)
        total += x
        squares += x * x
    if residual_ptr is not None:
        # Each thread reads back the columns that it wrote: the walks share one layout.
        x_row = sum_ptr + out

    mean = 0.0
    if CENTER:
        mean = tl.sum(total) / cols
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
        squares = tl.zeros([BLOCK_COLS], tl.float32)
        for start in range(0, cols, BLOCK_COLS):
            col = start + lane
            x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
            centered = tl.where(col < cols, x - mean, 0.0)
            squares += centered * centered
    rstd = tl.rsqrt(tl.sum(squares) / cols + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)

    for start in range(0, cols, BLOCK_COLS):
        col = start + lane
        x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
        weight = affine_weight(weight_ptr, col, col < cols, weight_offset)
        y = (x - mean) * rstd * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate_row = gate_ptr + row_offset(
                row, gate_inner_rows, gate_outer_stride, gate_inner_stride
            )
            gate = tl.load(gate_row + col, mask=col < cols, other=0.0).to(tl.float32)
            y *= activated(gate, ACTIVATION)
        tl.store(y_ptr + out + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)
