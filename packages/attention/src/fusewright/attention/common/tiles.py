"""Tiles of rows, for the kernels of every family of attention.

A tile is some rows of one head, [BLOCK_ROWS, BLOCK_D], from a pointer or, with
``CONFIG.DESCRIPTORS``, from a tensor descriptor over all tasks' rows and all heads' columns.
``CONFIG`` is a ``problem.KernelConfig``. A source says where a head's rows are read: the pointer or
descriptor; the strides of tasks, rows and heads; which task and head, and how many rows each has.
A place says where they are written to a contiguous [B, rows, heads, D]: which task and head, the
first row, how many rows and heads there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._core.tiles import product_in_order
from .checks import WIDTH_MULTIPLE

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
# The maximum of no scores: below every score, and finite, since infinity minus infinity is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Divides the strides of every operand; an operand with other strides is copied.
STRIDE_MULTIPLE = tl.constexpr(WIDTH_MULTIPLE)


def descriptor(x: torch.Tensor, block_rows: int) -> TensorDescriptor:
    """All rows of ``x`` [B, rows, H, D], its heads side by side, in tiles of this many rows of one
    head.
    """
    batches, rows, heads, width = x.shape
    batch, row, head, _ = x.stride()
    if rows == 1:
        # The stride of one row may be anything.
        row = batch if batches > 1 else heads * width
    columns = (heads - 1) * head + width
    return TensorDescriptor(x, [batches * rows, columns], [row, 1], [block_rows, width])


@triton.jit
def product(a, b, CONFIG: tl.constexpr):
    """a b in fp32."""
    # Triton 3.6 takes no text from a record as a constant argument.
    PRECISION: tl.constexpr = CONFIG.PRECISION
    return product_in_order(a, b, CONFIG.UPCAST, PRECISION)


@triton.jit
def length_of(key_lengths_ptr, batch, keys):
    """How many keys a task has: all, or its number in key_lengths, cut to 0 ... keys."""
    length = keys
    if key_lengths_ptr is not None:
        length = tl.load(key_lengths_ptr + batch)
        length = tl.minimum(tl.maximum(length, 0), keys).to(tl.int32)
    return length


@triton.jit
def load_rows(
    source,
    first,
    limit,
    BLOCK_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
    VALUES: tl.constexpr = False,
):
    """Rows ``first``, ``first + 1``, ... of a source, [BLOCK_ROWS, BLOCK_D], or, with ``VALUES``,
    [BLOCK_ROWS, BLOCK_V] of one that is as wide as values are. With ``MASKED`` those from ``limit``
    on are zero; without it they are undefined.
    """
    if CONFIG.DESCRIPTORS:
        x_descriptor, _, _, head_stride, batch, head, rows = source
        row = first + tl.arange(0, BLOCK_ROWS)
        x = x_descriptor.load([batch * rows + first, head * head_stride])
        if MASKED:
            x = tl.where((row < limit)[:, None], x, 0.0)
    else:
        x = load_from_pointer(source, first, limit, BLOCK_ROWS, MASKED, CONFIG, VALUES)
    return x


@triton.jit
def load_from_pointer(
    source,
    first,
    limit,
    BLOCK_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
    VALUES: tl.constexpr = False,
):
    """``load_rows`` of a source that is a pointer."""
    D: tl.constexpr = CONFIG.DV if VALUES else CONFIG.D
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_V if VALUES else CONFIG.BLOCK_D
    x_ptr, batch_stride, row_stride, head_stride, batch, head, _ = source
    row = first + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_D)
    start = tl.cast(first, tl.int64) * row_stride
    to_head = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    # Triton itself finds out whether 16 divides a stride, not 8: without these hints it would read
    # heads of 40 columns number by number.
    corner = x_ptr + tl.multiple_of(to_head + start, STRIDE_MULTIPLE)
    to_row = tl.arange(0, BLOCK_ROWS)[:, None] * row_stride
    to_row = tl.multiple_of(to_row, [STRIDE_MULTIPLE, STRIDE_MULTIPLE])
    at = corner + (to_row + col[None, :])
    if MASKED:
        x = tl.load(at, mask=(row < limit)[:, None] & (col < D)[None, :], other=0.0)
    elif D < BLOCK_D:
        x = tl.load(at, mask=(col < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def end_of(rows, limit):
    """The end of a tile's rows: ``limit``, or, where it is None, that of all rows of the head."""
    end = rows
    if limit is not None:
        end = limit
    return end


@triton.jit
def store_rows(out_ptr, x, place, D: tl.constexpr, limit=None):
    """Write a tile to its place: its rows before ``limit``, or all that there are."""
    batch, head, first, rows, heads = place
    row = first + tl.arange(0, x.shape[0])
    col = tl.arange(0, x.shape[1])
    corner = out_ptr + ((batch.to(tl.int64) * rows + first) * heads + head) * D
    at = corner + (tl.arange(0, x.shape[0])[:, None] * (heads * D) + col[None, :])
    inside = (row < end_of(rows, limit))[:, None] & (col < D)[None, :]
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)
