"""Triton kernels of the backward pass, shared by rms_norm, add_rms_norm, rms_norm_gated and
layer_norm.

A fixed number of programs loops over the rows; each keeps its partial sum of the weight's gradient
in registers and writes it once, and a second launch adds these in a fixed order. A small tensor
takes one launch, whose programs compute either. No atomics: the same inputs give the same bits on
one GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import row_offset
from .kernels import activated, affine_weight
from .tiles_backward import (
    column_sums,
    gate_slope,
    load_wide,
    normalized,
    row_means,
    store_parts,
)


@triton.jit
def norm_backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    parts_ptr,
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
    CENTER: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    READ_AGAIN: tl.constexpr,
):
    """One program takes every num_programs-th block of rows: dx and dgate of those rows, and a
    partial sum of dweight and dbias.
    """
    first = tl.program_id(0)
    col = tl.arange(0, BLOCK_COLS)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    weight = affine_weight(weight_ptr, col, col < cols, weight_offset, HAS_WEIGHT)[None, :]

    blocks = tl.cdiv(rows, BLOCK_ROWS)
    for block in tl.range(first, blocks, tl.num_programs(0), num_stages=NUM_STAGES):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_inside = (row < rows) | EVEN_ROWS
        inside = row_inside[:, None] & (col < cols)[None, :]
        x_offset = row_offset(row, x_inner_rows, x_outer_stride, x_inner_stride)
        dy_offset = row_offset(row, dy_inner_rows, dy_outer_stride, dy_inner_stride)
        x = x_ptr + x_offset[:, None] + col[None, :]
        dy = dy_ptr + dy_offset[:, None] + col[None, :]
        rstd = tl.load(rstd_ptr + row, mask=row_inside, other=0.0)[:, None]
        mean = 0.0
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=row_inside, other=0.0)[:, None]

        x_hat = normalized(x, mean, rstd, inside, CENTER, "evict_last" if READ_AGAIN else "")
        dy_here = load_wide(dy, inside, "evict_last" if READ_AGAIN else "")
        out = row.to(tl.int64)[:, None] * cols + col[None, :]
        if ACTIVATION != "":
            gate_offset = row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride)
            gate_at = gate_ptr + gate_offset[:, None] + col[None, :]
            gate = load_wide(gate_at, inside, "evict_last" if READ_AGAIN else "")
            dgate = dy_here * x_hat * weight * gate_slope(gate, ACTIVATION)
            tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dy_here *= activated(gate, ACTIVATION)
        dx_hat = dy_here * weight
        along, across = row_means(x_hat, dx_hat, cols, CENTER)
        if READ_AGAIN:
            # A wide row does not fit in registers beside dweight; its second use reads it from
            # the L1 cache.
            x_hat = normalized(x, mean, rstd, inside, CENTER, "evict_first")
            dy_here = load_wide(dy, inside, "evict_first")
            if ACTIVATION != "":
                dy_here *= activated(load_wide(gate_at, inside, "evict_first"), ACTIVATION)
            dx_hat = dy_here * weight
        dx = (dx_hat - x_hat * along - across) * rstd
        if WEIGHT_GRAD:
            dweight += dy_here * x_hat
        if BIAS_GRAD:
            dbias += dy_here
        if HAS_DSUM:
            dsum_offset = row_offset(row, dsum_inner_rows, dsum_outer_stride, dsum_inner_stride)
            dx += load_wide(dsum_ptr + dsum_offset[:, None] + col[None, :], inside, "")
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=inside)

    store_parts(parts_ptr, dweight, dbias, col, cols, WEIGHT_GRAD, BIAS_GRAD)


@triton.jit
def norm_backward_small_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    dbias_ptr,
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
    CENTER: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_COLS: tl.constexpr,
):
    """One program computes dweight and dbias of PART_COLS columns, or dx and dgate of BLOCK_ROWS
    rows.

    dweight needs nothing of dx, so where the cache holds x and dy one launch does both.
    """
    column_programs = (cols + PART_COLS - 1) // PART_COLS
    program = tl.program_id(0)
    if program < column_programs:
        part_col = program * PART_COLS + tl.arange(0, PART_COLS)
        dweight, dbias = column_sums(
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
            0,
            1,
            part_col,
            rows,
            cols,
            CENTER,
            WEIGHT_GRAD,
            BIAS_GRAD,
            ACTIVATION,
            PART_ROWS,
            PART_COLS,
        )
        if WEIGHT_GRAD:
            total = tl.sum(dweight, 0).to(dweight_ptr.dtype.element_ty)
            tl.store(dweight_ptr + part_col, total, mask=part_col < cols)
        if BIAS_GRAD:
            total = tl.sum(dbias, 0).to(dbias_ptr.dtype.element_ty)
            tl.store(dbias_ptr + part_col, total, mask=part_col < cols)
    else:
        row = (program - column_programs) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = tl.arange(0, BLOCK_COLS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        dy_offset = row_offset(row, dy_inner_rows, dy_outer_stride, dy_inner_stride)
        dy = load_wide(dy_ptr + dy_offset[:, None] + col[None, :], inside, "")
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        mean = 0.0
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        x_offset = row_offset(row, x_inner_rows, x_outer_stride, x_inner_stride)
        x = x_ptr + x_offset[:, None] + col[None, :]
        x_hat = normalized(x, mean, rstd, inside, CENTER, "")
        weight = affine_weight(weight_ptr, col, col < cols, weight_offset, HAS_WEIGHT)[None, :]
        out = row.to(tl.int64)[:, None] * cols + col[None, :]
        if ACTIVATION != "":
            gate_offset = row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride)
            gate = load_wide(gate_ptr + gate_offset[:, None] + col[None, :], inside, "")
            dgate = dy * x_hat * weight * gate_slope(gate, ACTIVATION)
            tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dy *= activated(gate, ACTIVATION)
        dx_hat = dy * weight
        along, across = row_means(x_hat, dx_hat, cols, CENTER)
        dx = (dx_hat - x_hat * along - across) * rstd
        if HAS_DSUM:
            dsum_offset = row_offset(row, dsum_inner_rows, dsum_outer_stride, dsum_inner_stride)
            dx += load_wide(dsum_ptr + dsum_offset[:, None] + col[None, :], inside, "")
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    dweight_ptr,
    dbias_ptr,
    parts,
    cols: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program adds the partial sums of BLOCK_COLS columns, in the order of the programs that
    wrote them.
    """
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    dweight = tl.zeros([BLOCK_PARTS, BLOCK_COLS], tl.float32)
    dbias = tl.zeros([BLOCK_PARTS, BLOCK_COLS], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        inside = (part < parts)[:, None] & (col < cols)[None, :]
        offset = part[:, None] * cols + col[None, :]
        if WEIGHT_GRAD:
            dweight += tl.load(parts_ptr + offset, mask=inside, other=0.0)
        if BIAS_GRAD:
            dbias_offset = offset + parts * cols
            dbias += tl.load(parts_ptr + dbias_offset, mask=inside, other=0.0)
    if WEIGHT_GRAD:
        total = tl.sum(dweight, 0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + col, total, mask=col < cols)
    if BIAS_GRAD:
        total = tl.sum(dbias, 0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + col, total, mask=col < cols)
