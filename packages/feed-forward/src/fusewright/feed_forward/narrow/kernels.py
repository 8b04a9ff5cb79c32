"""Triton kernels of SiLU behind a linear layer of few input columns, which is recomputed in the
backward pass: nothing of the layer is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_of(x_ptr, weight_ptr, row, rows, col, cols, inner):
    """u = x W^T of some rows and columns in fp32, its terms added in the order of x's columns."""
    u = tl.zeros([row.shape[0], col.shape[0]], tl.float32)
    x_at = x_ptr + row.to(tl.int64) * inner
    weight_at = weight_ptr + col.to(tl.int64) * inner
    for each in range(inner):
        x = tl.load(x_at + each, mask=row < rows, other=0.0).to(tl.float32)
        weight = tl.load(weight_at + each, mask=col < cols, other=0.0).to(tl.float32)
        u += x[:, None] * weight[None, :]
    return u


@triton.jit
def silu_linear_kernel(
    x_ptr,
    weight_ptr,
    h_ptr,
    rows,
    cols,
    inner,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes a tile of h = SiLU(x W^T)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    u = product_of(x_ptr, weight_ptr, row, rows, col, cols, inner)
    h = u * tl.sigmoid(u)
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_linear_backward_kernel(
    dh_ptr,
    x_ptr,
    weight_ptr,
    du_ptr,
    parts_ptr,
    rows,
    cols,
    inner,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """One program takes every num_programs-th block of rows of some columns: their part of
    dW = du^T x, [programs, columns, x's columns], and, where asked for, du.
    """
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    each = tl.arange(0, BLOCK_INNER)
    part = tl.zeros([BLOCK_COLS, BLOCK_INNER], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u = product_of(x_ptr, weight_ptr, row, rows, col, cols, inner)
        slope = tl.sigmoid(u)
        du = dh * (slope * (1.0 + u * (1.0 - slope)))
        if du_ptr is not None:
            tl.store(du_ptr + at, du, mask=inside)
        x_at = x_ptr + row.to(tl.int64)[:, None] * inner + each[None, :]
        of_x = (row < rows)[:, None] & (each < inner)[None, :]
        x = tl.load(x_at, mask=of_x, other=0.0).to(tl.float32)
        # In plain TF32 a product would lose what fp32 keeps of x.
        part += tl.dot(tl.trans(du), x, input_precision="tf32x3")
    at = (tl.program_id(0).to(tl.int64) * cols + col)[:, None] * inner + each[None, :]
    tl.store(parts_ptr + at, part, mask=(col < cols)[:, None] & (each < inner)[None, :])
