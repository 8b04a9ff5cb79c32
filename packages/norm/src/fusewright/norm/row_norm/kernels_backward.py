"""Triton kernels of the backward pass, shared by rms_norm, add_rms_norm, rms_norm_gated,
layer_norm and add_layer_norm.

A fixed number of programs loops over the rows; each keeps its partial sum of the weight's gradient
in registers and writes it once, and a second launch adds these in a fixed order. A small tensor
takes one launch, whose programs compute either. No atomics: the same inputs give the same bits on
one GPU. What is absent has no pointer: the mean is there for a centred norm alone. With ``y_ptr``
what the forward pass returned is written again, which costs no second reading of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import affine_weight, load_wide, rows_at
from .tiles_backward import column_sums, row_gradients, store_normalized, store_parts


@triton.jit
def norm_backward_kernel(
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
    weight = affine_weight(weight_ptr, col, col < cols, weight_offset)[None, :]
    x = x_ptr, (x_inner_rows, x_outer_stride, x_inner_stride)
    dy = dy_ptr, (dy_inner_rows, dy_outer_stride, dy_inner_stride)
    gate = gate_ptr, (gate_inner_rows, gate_outer_stride, gate_inner_stride)

    blocks = tl.cdiv(rows, BLOCK_ROWS)
    for block in tl.range(first, blocks, tl.num_programs(0), num_stages=NUM_STAGES):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_inside = (row < rows) | EVEN_ROWS
        dx, out, inside, x_hat, dy_here = row_gradients(
            *(x, dy, gate, mean_ptr, rstd_ptr, dgate_ptr, weight, row, row_inside, col, cols),
            *(ACTIVATION, READ_AGAIN),
        )
        if WEIGHT_GRAD:
            dweight += dy_here * x_hat
        if BIAS_GRAD:
            dbias += dy_here
        if y_ptr is not None:
            store_normalized(y_ptr, bias_ptr, x_hat, weight, out, inside, col, cols)
        if dsum_ptr is not None:
            dsum_strides = dsum_inner_rows, dsum_outer_stride, dsum_inner_stride
            dx += load_wide(rows_at(dsum_ptr, dsum_strides, row, col), inside, "")
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=inside)

    store_parts(parts_ptr, dweight, dbias, col, cols, WEIGHT_GRAD, BIAS_GRAD)


@triton.jit
def norm_backward_small_kernel(
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
    ACTIVATION: tl.constexpr,
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
    x = x_ptr, (x_inner_rows, x_outer_stride, x_inner_stride)
    dy = dy_ptr, (dy_inner_rows, dy_outer_stride, dy_inner_stride)
    gate = gate_ptr, (gate_inner_rows, gate_outer_stride, gate_inner_stride)
    if program < column_programs:
        part_col = program * PART_COLS + tl.arange(0, PART_COLS)
        dweight, dbias = column_sums(
            *(x, dy, gate, mean_ptr, rstd_ptr, 0, 1, part_col, rows, cols),
            *(dweight_ptr is not None, dbias_ptr is not None, ACTIVATION, PART_ROWS, PART_COLS),
        )
        if dweight_ptr is not None:
            total = tl.sum(dweight, 0).to(dweight_ptr.dtype.element_ty)
            tl.store(dweight_ptr + part_col, total, mask=part_col < cols)
        if dbias_ptr is not None:
            total = tl.sum(dbias, 0).to(dbias_ptr.dtype.element_ty)
            tl.store(dbias_ptr + part_col, total, mask=part_col < cols)
    else:
        row = (program - column_programs) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        col = tl.arange(0, BLOCK_COLS)
        weight = affine_weight(weight_ptr, col, col < cols, weight_offset)[None, :]
        dx, out, inside, x_hat, _ = row_gradients(
            *(x, dy, gate, mean_ptr, rstd_ptr, dgate_ptr, weight, row, row < rows, col, cols),
            *(ACTIVATION, False),
        )
        if y_ptr is not None:
            store_normalized(y_ptr, bias_ptr, x_hat, weight, out, inside, col, cols)
        if dsum_ptr is not None:
            dsum_strides = dsum_inner_rows, dsum_outer_stride, dsum_inner_stride
            dx += load_wide(rows_at(dsum_ptr, dsum_strides, row, col), inside, "")
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    dweight_ptr,
    dbias_ptr,
    parts,
    cols: tl.constexpr,
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
        if dweight_ptr is not None:
            dweight += tl.load(parts_ptr + offset, mask=inside, other=0.0)
        if dbias_ptr is not None:
            dbias_offset = offset + parts * cols
            dbias += tl.load(parts_ptr + dbias_offset, mask=inside, other=0.0)
    if dweight_ptr is not None:
        total = tl.sum(dweight, 0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + col, total, mask=col < cols)
    if dbias_ptr is not None:
        total = tl.sum(dbias, 0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + col, total, mask=col < cols)
