"""Device functions of the learned optimizer's network, 39 and more -> 32 -> 32 -> 2."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.statistics.tiles import at_least


@triton.jit
def matrix(base, rows, columns, row_stride, column_stride):
    """``[32, 32]`` numbers, zero beyond the rows and columns."""
    i, j = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    mask = (i < rows) & (j < columns)
    return tl.load(base + i * row_stride + j * column_stride, mask=mask, other=0.0)


@triton.jit
def leading(x):
    """fp32 with the bits that TF32 keeps."""
    return (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(x, w, start, PRECISION: tl.constexpr):
    """start + x w. "tf32x3" has about fp32's precision: the bits of each factor that TF32 drops are
    multiplied too. Triton's own tf32x3 checks for infinities, which takes as many instructions
    again.
    """
    if PRECISION == "tf32x3":
        x_leading, w_leading = leading(x), leading(w)
        start = tl.dot(x - x_leading, w_leading, start, input_precision="tf32")
        start = tl.dot(x_leading, w - w_leading, start, input_precision="tf32")
        start = tl.dot(x_leading, w_leading, start, input_precision="tf32")
    else:
        start = tl.dot(x, w, start, input_precision=PRECISION)
    return start


@triton.jit
def hidden(x, w, b, PRECISION: tl.constexpr):
    """relu(x w + b)."""
    start = tl.zeros((x.shape[0], 32), tl.float32) + b[None, :]
    return at_least(product(x, w, start, PRECISION), 0.0)
