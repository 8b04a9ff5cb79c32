"""Device functions of several families' kernels: the activation, products, tiles of tokens and of a
packed memory.

A memory and its momentum lie packed as [2, SIZE], each w1 [HIDDEN, D], the transpose of w2 [HIDDEN,
D], b1 [HIDDEN], b2 [D] one after the other: ``memory`` is a pointer to the first number of one of
the two. A tile of tokens is [BLOCK_C, BLOCK_D], one of the hidden layer [BLOCK_C, BLOCK_H], of the
block ``block`` of HIDDEN / BLOCK_H.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import to_tf32

RSQRT_2 = tl.constexpr(0.7071067811865476)
RSQRT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """act, act' and act'' of z; what is not used costs nothing."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        h = z * s
        slope = s * (1.0 + z * (1.0 - s))
        curve = s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))
    elif ACTIVATION == "relu":
        # A NaN stays one.
        h = tl.where(z <= 0.0, 0.0, z)
        slope = tl.where(z > 0.0, 1.0, 0.0)
        curve = tl.zeros_like(z)
    else:
        density = RSQRT_2_PI * tl.exp(-0.5 * z * z)
        below = 0.5 + 0.5 * tl.erf(z * RSQRT_2)
        h = z * below
        slope = below + z * density
        curve = density * (2.0 - z * z)
    return h, slope, curve


@triton.jit
def add_product(acc, a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b. The interpreter multiplies only fp32 correctly: it casts the operands."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def product_onto(total, a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b in fp32."""
    if PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    return add_product(total, a, b, UPCAST, PRECISION)


@triton.jit
def product(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """a b in fp32."""
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    return product_onto(total, a, b, UPCAST, PRECISION)


@triton.jit
def load_matrix(at, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The numbers ``row`` x ``col`` of a contiguous [ROWS, COLS]; zero outside."""
    inside = (row < ROWS)[:, None] & (col < COLS)[None, :]
    return tl.load(at + row[:, None] * COLS + col[None, :], mask=inside, other=0.0)


@triton.jit
def store_matrix(at, x, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    inside = (row < ROWS)[:, None] & (col < COLS)[None, :]
    tl.store(at + row[:, None] * COLS + col[None, :], x, mask=inside)


@triton.jit
def load_vector(at, index, LENGTH: tl.constexpr):
    return tl.load(at + index, mask=index < LENGTH, other=0.0)


@triton.jit
def load_weights(
    memory,
    block,
    LAYER: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """[BLOCK_H, BLOCK_D] of w1, or for LAYER 2 of the transpose of w2."""
    row = block * BLOCK_H + tl.arange(0, BLOCK_H)
    return load_matrix(memory + (LAYER - 1) * HIDDEN * D, row, tl.arange(0, BLOCK_D), HIDDEN, D)


@triton.jit
def store_weights(
    memory,
    x,
    block,
    LAYER: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = block * BLOCK_H + tl.arange(0, BLOCK_H)
    at = memory + (LAYER - 1) * HIDDEN * D
    store_matrix(at, x, row, tl.arange(0, BLOCK_D), HIDDEN, D)


@triton.jit
def load_b1(
    memory,
    block,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    index = block * BLOCK_H + tl.arange(0, BLOCK_H)
    return load_vector(memory + 2 * HIDDEN * D, index, HIDDEN)


@triton.jit
def load_b2(memory, D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_D: tl.constexpr):
    return load_vector(memory + (2 * HIDDEN * D + HIDDEN), tl.arange(0, BLOCK_D), D)


@triton.jit
def store_memory(
    memory,
    w1,
    b1,
    w2,
    b2,
    block,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The same, stored; b2 by the first block alone."""
    store_weights(memory, tl.trans(w1), block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)
    store_weights(memory, tl.trans(w2), block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)
    row = block * BLOCK_H + tl.arange(0, BLOCK_H)
    tl.store(memory + 2 * HIDDEN * D + row, b1, mask=row < HIDDEN)
    col = tl.arange(0, BLOCK_D)
    tl.store(memory + (2 * HIDDEN * D + HIDDEN) + col, b2, mask=(col < D) & (block == 0))


@triton.jit
def token_rows(
    x_ptr,
    batch_stride,
    token_stride,
    head_stride,
    batch,
    head,
    first,
    there,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The tokens ``first``, ``first + 1``, ... of one head of [B, T, heads, D]; zero where they are
    not ``there``.
    """
    col = tl.arange(0, BLOCK_D)
    token = (first + tl.arange(0, BLOCK_C)).to(tl.int64)
    start = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    at = x_ptr + start + token[:, None] * token_stride + col[None, :]
    return tl.load(at, mask=there[:, None] & (col < D)[None, :], other=0.0)


@triton.jit
def store_token_rows(
    x_ptr,
    x,
    batch,
    head,
    first,
    there,
    tokens,
    heads,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The same into a contiguous [B, T, heads, D]."""
    col = tl.arange(0, BLOCK_D)
    token = (first + tl.arange(0, BLOCK_C)).to(tl.int64)
    row = (batch.to(tl.int64) * tokens + token) * heads + head
    at = x_ptr + row[:, None] * D + col[None, :]
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=there[:, None] & (col < D)[None, :])
