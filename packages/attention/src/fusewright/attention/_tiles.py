"""What the attention kernels have in common: tiles of rows, their products, the length of a task.

A tile is some rows of one head, [BLOCK_ROWS, BLOCK_D], from a pointer or, with ``DESCRIPTOR``, from
a tensor descriptor over all tasks' rows and all heads' columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._checks import WIDTH_MULTIPLE

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
# Stands for the maximum of no scores; below every score, but no infinity, whose distance to itself
# is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Divides the strides of every operand; those of which it does not are copied.
STRIDE_MULTIPLE = tl.constexpr(WIDTH_MULTIPLE)


@triton.jit
def load_rows(
    source,
    first,
    limit,
    BLOCK_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Rows ``first``, ``first + 1``, ... of a head.

    With ``MASKED`` those from ``limit`` on are zero; without, they are whatever lies there.
    ``source`` tells where a head is: the pointer or descriptor; the strides of tasks, rows and
    heads; which task and head, and how many rows each has.
    """
    x_ptr, batch_stride, row_stride, head_stride, batch, head, rows = source
    row = first + tl.arange(0, BLOCK_ROWS)
    if DESCRIPTOR:
        x = x_ptr.load([batch * rows + first, head * head_stride])
        if MASKED:
            x = tl.where((row < limit)[:, None], x, 0.0)
    else:
        col = tl.arange(0, BLOCK_D)
        start = tl.cast(first, tl.int64) * row_stride
        to_head = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
        # Triton itself finds out whether 16 divides a stride, not 8: without being told it would
        # read heads of 40 columns number by number.
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
def store_rows(
    out_ptr,
    x,
    batch,
    head,
    first,
    rows,
    heads,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a tile to a contiguous [B, rows, heads, D]."""
    row = first + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_D)
    corner = out_ptr + ((batch.to(tl.int64) * rows + first) * heads + head) * D
    at = corner + (tl.arange(0, BLOCK_ROWS)[:, None] * (heads * D) + col[None, :])
    inside = (row < rows)[:, None] & (col < D)[None, :]
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def to_tf32(x):
    """fp32 rounded to the 10 bits of TF32, ties away from zero; the card itself cuts them off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    # The card's own NaN is all ones, which would become a zero.
    return tl.where(x == x, rounded, x)


@triton.jit
def product(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """a b in fp32. The interpreter multiplies only fp32 rightly: there the operands are widened.

    On a card products are added one after the other, so the passes agree on every score to the bit,
    whatever their tiles. The interpreter's library has another order for every shape of tile: there
    the terms are added here, along an axis that is not the innermost.
    """
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    if UPCAST:
        nothing = tl.zeros([a.shape[0], a.shape[1], b.shape[1]], tl.float32)
        ab = tl.sum((nothing + a[:, :, None]) * b[None, :, :], 1)
    else:
        ab = tl.dot(a, b, input_precision=PRECISION)
    return ab


@triton.jit
def length_of(key_lengths_ptr, batch, keys, HAS_LENGTHS: tl.constexpr):
    """How many keys a task has: all, or as many as it says of those that there are."""
    length = keys
    if HAS_LENGTHS:
        length = tl.load(key_lengths_ptr + batch)
        length = tl.minimum(tl.maximum(length, 0), keys).to(tl.int32)
    return length


@triton.jit
def masked_softmax(
    q,
    k,
    scale,
    first,
    length,
    BLOCK_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """exp(s - m) of the keys before ``length``, s = scale q k^T, with the row's maximum m in base 2
    and the row's sum; without any score above -inf the maximum is LOWEST and the sum 0.
    """
    factor = scale * LOG2_E
    inside = first + tl.arange(0, BLOCK_KEYS) < length
    s = tl.where(inside[None, :], product(q, tl.trans(k), UPCAST, PRECISION), float("-inf"))
    m = tl.max(s, 1) * factor
    m = tl.where(m == float("-inf"), LOWEST, m)
    # As everywhere: a multiply-add, rounded once. Otherwise the passes would not agree on p.
    p = tl.exp2(s * factor - m[:, None])
    return p, m, tl.sum(p, 1)
