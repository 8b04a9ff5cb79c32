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
def product(x, w, start, PRECISION: tl.constexpr):
    """start + x w. "fp16x3" has about fp32's precision: each factor is the sum of two numbers in
    fp16, which have 22 bits together, and the product of both second ones is left out. Numbers of
    65520 and more are not finite in fp16.
    """
    if PRECISION == "fp16x3":
        x_high, w_high = x.to(tl.float16), w.to(tl.float16)
        x_low = (x - x_high.to(tl.float32)).to(tl.float16)
        w_low = (w - w_high.to(tl.float32)).to(tl.float16)
        start = tl.dot(x_low, w_high, start)
        start = tl.dot(x_high, w_low, start)
        start = tl.dot(x_high, w_high, start)
    else:
        start = tl.dot(x, w, start, input_precision=PRECISION)
    return start


@triton.jit
def hidden(x, w, b, PRECISION: tl.constexpr):
    """relu(x w + b)."""
    start = tl.zeros((x.shape[0], 32), tl.float32) + b[None, :]
    return after_start(x, w, start, PRECISION)


@triton.jit
def after_start(x, w, start, PRECISION: tl.constexpr):
    """relu(x w + start)."""
    return at_least(product(x, w, start, PRECISION), 0.0)
