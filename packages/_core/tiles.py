"""Device functions of Triton that several packages' kernels call: rows, tiles and their products.

The interpreter multiplies only fp32 correctly and truncates where it converts to bf16. ``UPCAST``
tells a kernel that the interpreter runs it: operands are then cast to fp32, and rounded before
they are cast back.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(row, inner_rows, outer_stride, inner_stride):
    """Element offset of each row. Rows are counted through two leading axes; 64-bit, for tensors
    past 2**31 elements.
    """
    outer = (row // inner_rows).to(tl.int64) * outer_stride
    return outer + (row % inner_rows).to(tl.int64) * inner_stride


@triton.jit
def to_tf32(x):
    """fp32 rounded to the 10 bits of TF32, ties away from zero; the GPU itself cuts them off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    # The GPU's own NaN is all ones, which would become a zero.
    return tl.where(x == x, rounded, x)


@triton.jit
def as_operand(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """An fp32 tile in the dtype in which it enters a product or memory."""
    if UPCAST and DTYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(DTYPE)


@triton.jit
def product_in_order(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """a b in fp32, each number the same to the bit whatever the tiles are.

    A GPU adds products one after the other. The interpreter's library has another order for every
    shape of tile: there the terms are added here, along an axis that is not the innermost.
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
