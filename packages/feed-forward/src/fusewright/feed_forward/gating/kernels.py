"""Triton kernels of silu_mul, forward and backward.

    y     = gate * sigmoid(gate) * up
    dgate = dy * up * s * (1 + gate * (1 - s)),  dup = dy * gate * s,  s = sigmoid(gate)

Programs take consecutive blocks of the result's elements, wherever rows begin, so no lane is idle
at the end of a row. Rows of an operand may have a stride larger than their length, as the halves of
a joint product do. Elements come in vectors, the longest that divide rows and strides, so that one
access takes up to 16 bytes: columns, strides and offsets are counted in vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import row_offset


@triton.jit
def rows_and_cols(first, cols: tl.constexpr, COUNT: tl.constexpr):
    """Row and column of the COUNT vectors from ``first`` on, in 32 bits."""
    vector = (first % cols).to(tl.int32) + tl.arange(0, COUNT)
    return (first // cols).to(tl.int32) + vector // cols, vector % cols


@triton.jit
def elements_of(vector, VECTOR: tl.constexpr):
    """Offsets of the elements of each vector."""
    return vector[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def load_wide(pointers, inside):
    """The elements at the pointers in fp32, 0 beyond the last one."""
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def silu_mul_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    up_inner_rows,
    up_outer_stride,
    up_inner_stride,
    vectors,
    cols: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes BLOCK consecutive elements of y.

    Where cols is 0, every operand is one run of elements.
    """
    count: tl.constexpr = BLOCK // VECTOR
    first = tl.program_id(0).to(tl.int64) * count
    y_at = first + tl.arange(0, count)  # [count] vectors
    inside = (y_at < vectors)[:, None]
    gate_at = y_at
    up_at = y_at
    if cols:
        row, col = rows_and_cols(first, cols, count)
        gate_at = row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride) + col
        up_at = row_offset(row, up_inner_rows, up_outer_stride, up_inner_stride) + col

    gate = load_wide(gate_ptr + elements_of(gate_at, VECTOR), inside)  # [count, VECTOR]
    up = load_wide(up_ptr + elements_of(up_at, VECTOR), inside)
    y = gate * tl.sigmoid(gate) * up
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + elements_of(y_at, VECTOR), y, mask=inside)


@triton.jit
def silu_mul_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_inner_rows,
    dy_outer_stride,
    dy_inner_stride,
    gate_inner_rows,
    gate_outer_stride,
    gate_inner_stride,
    up_inner_rows,
    up_outer_stride,
    up_inner_stride,
    grad_stride,
    vectors,
    cols: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes BLOCK consecutive elements of dgate and of dup, whose rows have the
    stride grad_stride. Where cols is 0, they and every operand are one run of elements.
    """
    count: tl.constexpr = BLOCK // VECTOR
    first = tl.program_id(0).to(tl.int64) * count
    grad_at = first + tl.arange(0, count)  # [count] vectors
    inside = (grad_at < vectors)[:, None]
    dy_at = grad_at
    gate_at = grad_at
    up_at = grad_at
    if cols:
        row, col = rows_and_cols(first, cols, count)
        dy_at = row_offset(row, dy_inner_rows, dy_outer_stride, dy_inner_stride) + col
        gate_at = row_offset(row, gate_inner_rows, gate_outer_stride, gate_inner_stride) + col
        up_at = row_offset(row, up_inner_rows, up_outer_stride, up_inner_stride) + col
        grad_at = row.to(tl.int64) * grad_stride + col

    dy = load_wide(dy_ptr + elements_of(dy_at, VECTOR), inside)  # [count, VECTOR]
    gate = load_wide(gate_ptr + elements_of(gate_at, VECTOR), inside)
    up = load_wide(up_ptr + elements_of(up_at, VECTOR), inside)
    slope = tl.sigmoid(gate)
    dgate = dy * up * slope * (1.0 + gate * (1.0 - slope))
    dup = dy * (gate * slope)
    at = elements_of(grad_at, VECTOR)
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, dup.to(dup_ptr.dtype.element_ty), mask=inside)
