"""Triton kernel of apply_rotary, forward and backward.

    x'_a = x_a cos_tj - x_b sin_tj    x'_b = x_b cos_tj + x_a sin_tj

a and b are the columns of pair j of the R columns that are rotated: j and j + R/2, or 2 j and
2 j + 1. The backward pass rotates by the opposite angle.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(x, y, cos, sin):
    """Both columns of pairs."""
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def apply_rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    tokens,
    heads,
    blocks,
    CONFIG: tl.constexpr,
):
    """One program rotates ROWS heads of the tokens of one row of the batch; the result is
    contiguous.
    """
    D: tl.constexpr = CONFIG.D
    HALF: tl.constexpr = CONFIG.HALF
    BLOCK: tl.constexpr = CONFIG.BLOCK
    ROWS: tl.constexpr = CONFIG.ROWS
    dtype = out_ptr.dtype.element_ty
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    # Tokens are 64-bit, since they are multiplied by strides.
    first = (tl.program_id(0) % blocks).to(tl.int64) * ROWS
    row = (first % heads).to(tl.int32) + tl.arange(0, ROWS)
    token = first // heads + row // heads
    head = row % heads
    inside = (token < tokens)[:, None]
    x_ptr += (batch * x_batch_stride + token * x_token_stride + head * x_head_stride)[:, None]
    out_ptr += (((batch * tokens + token) * heads + head) * D)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    # [ROWS, BLOCK]
    has_pair = inside & (pair < HALF)
    cos_at = (batch * cos_batch_stride + token * cos_token_stride)[:, None] + pair
    sin_at = (batch * sin_batch_stride + token * sin_token_stride)[:, None] + pair
    cos = tl.load(cos_ptr + cos_at, mask=has_pair, other=0.0)
    sin = tl.load(sin_ptr + sin_at, mask=has_pair, other=0.0)
    if CONFIG.BACK:
        sin = -sin
    if CONFIG.INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        has_column = inside & (column < 2 * HALF)
        pairs = tl.load(x_ptr + column, mask=has_column, other=0.0).to(tl.float32)
        x, y = tl.split(tl.reshape(pairs, [ROWS, BLOCK, 2]))
        x, y = rotated(x, y, cos, sin)
        joined = tl.reshape(tl.join(x, y), [ROWS, 2 * BLOCK])
        tl.store(out_ptr + column, joined.to(dtype), mask=has_column)
    else:
        x = tl.load(x_ptr + pair, mask=has_pair, other=0.0).to(tl.float32)
        y = tl.load(x_ptr + HALF + pair, mask=has_pair, other=0.0).to(tl.float32)
        x, y = rotated(x, y, cos, sin)
        tl.store(out_ptr + pair, x.to(dtype), mask=has_pair)
        tl.store(out_ptr + HALF + pair, y.to(dtype), mask=has_pair)
    if D > 2 * HALF:
        column = 2 * HALF + tl.arange(0, CONFIG.REST)[None, :]
        has_column = inside & (column < D)
        tl.store(out_ptr + column, tl.load(x_ptr + column, mask=has_column), mask=has_column)
