"""What the kernels have in common: tiles of rows and their products."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    x_ptr,
    first,
    limit,
    row_stride,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows ``first``, ``first + 1``, ... of a matrix with contiguous rows; zeros from ``limit``
    on.
    """
    row, col = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    corner = x_ptr + tl.cast(first, tl.int64) * row_stride
    at = corner + (row[:, None] * row_stride + col[None, :])
    return tl.load(at, mask=(first + row < limit)[:, None] & (col < D)[None, :], other=0.0)


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

    On a card products are added one after the other, whatever their tiles. The interpreter's
    library has another order for every shape of tile: there the terms are added here, along an axis
    that is not the innermost.
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
def product_with_rows(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T, for a loop in which b changes. fp32 tiles that no tensor core takes are multiplied
    from registers: a stays in them for the whole loop where it stands on the left, and not on the
    right.
    """
    if a.dtype == tl.float32 and PRECISION == "ieee":
        ab = tl.trans(product(b, tl.trans(a), UPCAST, PRECISION))
    else:
        ab = product(a, tl.trans(b), UPCAST, PRECISION)
    return ab


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def activation(q, k, bias, scale, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """sigmoid(scale q k^T + bias) of one head, [rows of q, rows of k]: the same arithmetic in every
    pass.
    """
    z = product(q, tl.trans(k), UPCAST, PRECISION) * (scale * LOG2_E) + bias * LOG2_E
    return 1.0 / (1.0 + tl.exp2(-z))
