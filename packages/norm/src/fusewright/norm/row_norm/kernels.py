"""Triton kernels of the forward pass, shared by rms_norm, add_rms_norm, rms_norm_gated and
layer_norm.

The four are one formula: layer_norm centres the row first (``CENTER``), add_rms_norm adds a
residual first, rms_norm_gated multiplies by a gate last (``ACTIVATION``, "" without one). Rows up
to the width of the launch table stay in registers; wider ones are read in blocks, two or three
times, the second and third time from the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import row_offset


@triton.jit
def affine_weight(weight_ptr, col, within, weight_offset, HAS_WEIGHT: tl.constexpr):
    """The factor of each column, offset in fp32; 1 where there is no weight."""
    weight = tl.full(col.shape, 1.0, tl.float32)
    if HAS_WEIGHT:
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
    STATISTICS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    INPUT_EVICTION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program normalises BLOCK_ROWS whole rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_COLS)
    row_inside = (row < rows) | EVEN_ROWS
    inside = row_inside[:, None] & (col < cols)[None, :]
    out = row.to(tl.int64)[:, None] * cols + col[None, :]

    x_offset = row_offset(row, x_inner_rows, x_outer_stride, x_inner_stride)
    x = tl.load(
        x_ptr + x_offset[:, None] + col[None, :],
        mask=inside,
        other=0.0,
        eviction_policy=INPUT_EVICTION,
    ).to(tl.float32)
    if HAS_RESIDUAL:
        residual_offset = row_offset(
            row, residual_inner_rows, residual_outer_stride, residual_inner_stride
        )
        residual = tl.load(
            residual_ptr + residual_offset[:, None] + col[None, :],
            mask=inside,
            other=0.0,
            eviction_policy=INPUT_EVICTION,
        )
        # What is normalised is the sum as the caller receives it, rounded to its dtype.
        total = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, total, mask=inside)
        x = total.to(tl.float32)
    weight = affine_weight(weight_ptr, col, col < cols, weight_offset, HAS_WEIGHT)

    if CENTER:
        mean = tl.sum(x, 1) / cols
        if STATISTICS:
            tl.store(mean_ptr + row, mean, mask=row_inside)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / cols + eps)
    y = x * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        gate_offset = row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride)
        gate = tl.load(
            gate_ptr + gate_offset[:, None] + col[None, :],
            mask=inside,
            other=0.0,
            eviction_policy=INPUT_EVICTION,
        )
        y *= activated(gate.to(tl.float32), ACTIVATION)

    if STATISTICS:
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
    STATISTICS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
        if HAS_RESIDUAL:
            residual_row = residual_ptr + row_offset(
                row, residual_inner_rows, residual_outer_stride, residual_inner_stride
            )
            x += tl.load(residual_row + col, mask=col < cols, other=0.0).to(tl.float32)
            added = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + out + col, added, mask=col < cols)
            x = added.to(tl.float32)
        total += x
        squares += x * x
    if HAS_RESIDUAL:
        # Each thread reads back the columns that it wrote: both passes have one layout.
        x_row = sum_ptr + out

    mean = 0.0
    if CENTER:
        mean = tl.sum(total) / cols
        if STATISTICS:
            tl.store(mean_ptr + row, mean)
        squares = tl.zeros([BLOCK_COLS], tl.float32)
        for start in range(0, cols, BLOCK_COLS):
            col = start + lane
            x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
            centered = tl.where(col < cols, x - mean, 0.0)
            squares += centered * centered
    rstd = tl.rsqrt(tl.sum(squares) / cols + eps)
    if STATISTICS:
        tl.store(rstd_ptr + row, rstd)

    for start in range(0, cols, BLOCK_COLS):
        col = start + lane
        x = tl.load(x_row + col, mask=col < cols, other=0.0).to(tl.float32)
        weight = affine_weight(weight_ptr, col, col < cols, weight_offset, HAS_WEIGHT)
        y = (x - mean) * rstd * weight
        if HAS_BIAS:
            y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            gate_row = gate_ptr + row_offset(
                row, gate_inner_rows, gate_outer_stride, gate_inner_stride
            )
            gate = tl.load(gate_row + col, mask=col < cols, other=0.0).to(tl.float32)
            y *= activated(gate, ACTIVATION)
        tl.store(y_ptr + out + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)
