"""What the kernels of the backward pass share: gradients of rows, and sums over rows.

An operand (x, dy, gate) is a pointer, absent for no gate, and the strides of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import row_offset
from .kernels import activated, load_wide, rows_at


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, row, row_inside):
    """mean and rstd of some rows; a norm that does not centre has no mean, which counts as 0."""
    rstd = tl.load(rstd_ptr + row, mask=row_inside, other=0.0)[:, None]
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row, mask=row_inside, other=0.0)[:, None]
    return mean, rstd


@triton.jit
def normalized(at, mean, rstd, inside, CENTER: tl.constexpr, EVICTION: tl.constexpr):
    """(x - mean) * rstd of what is there, 0 outside the rows."""
    centered = load_wide(at, inside, EVICTION)
    if CENTER:
        centered = tl.where(inside, centered - mean, 0.0)
    return centered * rstd


@triton.jit
def gate_slope(gate, ACTIVATION: tl.constexpr):
    """The derivative of what a gate multiplies by."""
    factor = tl.sigmoid(gate)
    if ACTIVATION == "silu":
        return factor * (1.0 + gate * (1.0 - factor))
    else:
        return factor * (1.0 - factor)


@triton.jit
def row_gradients(
    x,
    dy,
    gate,
    mean_ptr,
    rstd_ptr,
    dgate_ptr,
    weight,
    row,
    row_inside,
    col,
    cols,
    ACTIVATION: tl.constexpr,
    READ_AGAIN: tl.constexpr,
):
    """dx of whole rows without dsum, where it is to be written and which of it is inside; x_hat,
    and dy as it passes the gate. Writes dgate.
    """
    x_ptr, x_strides = x
    dy_ptr, dy_strides = dy
    center: tl.constexpr = mean_ptr is not None
    keep: tl.constexpr = "evict_last" if READ_AGAIN else ""
    inside = row_inside[:, None] & (col < cols)[None, :]
    x_offset, dy_offset = row_offset(row, *x_strides), row_offset(row, *dy_strides)
    x_at = x_ptr + x_offset[:, None] + col[None, :]
    dy_at = dy_ptr + dy_offset[:, None] + col[None, :]
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, row_inside)
    x_hat = normalized(x_at, mean, rstd, inside, center, keep)
    dy_here = load_wide(dy_at, inside, keep)
    out = row.to(tl.int64)[:, None] * cols + col[None, :]
    if ACTIVATION != "":
        gate_at = rows_at(*gate, row, col)
        gate_here = load_wide(gate_at, inside, keep)
        dgate = dy_here * x_hat * weight * gate_slope(gate_here, ACTIVATION)
        tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        dy_here *= activated(gate_here, ACTIVATION)
    dx_hat = dy_here * weight
    # The mean of dx_hat counts for a centred norm alone.
    along = tl.sum(x_hat * dx_hat, 1)[:, None] / cols
    across = 0.0
    if center:
        across = tl.sum(dx_hat, 1)[:, None] / cols
    if READ_AGAIN:
        # A wide row does not fit in registers beside dweight; it waits for its second use in the
        # L1 cache.
        x_hat = normalized(x_at, mean, rstd, inside, center, "evict_first")
        dy_here = load_wide(dy_at, inside, "evict_first")
        if ACTIVATION != "":
            dy_here *= activated(load_wide(gate_at, inside, "evict_first"), ACTIVATION)
        dx_hat = dy_here * weight
    return (dx_hat - x_hat * along - across) * rstd, out, inside, x_hat, dy_here


@triton.jit
def store_normalized(y_ptr, bias_ptr, x_hat, weight, out, inside, col, cols):
    """Write again what the forward pass of a norm without a gate returned."""
    y = x_hat * weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def column_sums(
    x,
    dy,
    gate,
    mean_ptr,
    rstd_ptr,
    first,
    step,
    col,
    rows,
    cols,
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
        dy_here = load_wide(rows_at(*dy, row, col), inside, "")
        if ACTIVATION != "":
            dy_here *= activated(load_wide(rows_at(*gate, row, col), inside, ""), ACTIVATION)
        if WEIGHT_GRAD:
            mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, row < rows)
            x_at = rows_at(*x, row, col)
            dweight += dy_here * normalized(x_at, mean, rstd, inside, mean_ptr is not None, "")
        if BIAS_GRAD:
            dbias += dy_here
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
