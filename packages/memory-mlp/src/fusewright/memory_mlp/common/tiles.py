"""Device functions of several families' kernels: the activation, products, tiles of tokens and of a
packed memory.

A memory and its momentum lie packed as [2, SIZE], each w1 [HIDDEN, D], the transpose of w2 [HIDDEN,
D], b1 [HIDDEN], b2 [D] one after the other: ``memory`` is a pointer to the first number of one of
the two. A tile of tokens is [BLOCK_C, BLOCK_D], one of the hidden layer [BLOCK_C, BLOCK_H], of the
block ``block`` of HIDDEN / BLOCK_H. ``CONFIG`` is the record of a family's constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import to_tf32

RSQRT_2 = tl.constexpr(0.7071067811865476)
RSQRT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def zeros(ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of sums: the shape as two numbers, which may be fields of a CONFIG."""
    return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def activated(z, CONFIG: tl.constexpr):
    """act, act' and act'' of z; what is not used costs nothing."""
    if CONFIG.ACTIVATION == "silu":
        s = tl.sigmoid(z)
        h = z * s
        slope = s * (1.0 + z * (1.0 - s))
        curve = s * (1.0 - s) * (2.0 + z * (1.0 - 2.0 * s))
    elif CONFIG.ACTIVATION == "relu":
        # A NaN stays one.
        h = tl.where(z <= 0.0, 0.0, z)
        slope = tl.where(z > 0.0, 1.0, 0.0)
        # Zeros in z's own layout: Gluon's kernels call this too.
        curve = tl.where(z > 0.0, 0.0, 0.0)
    else:
        # Where the density is zero the square may overflow.
        square = tl.minimum(z * z, 1024.0, propagate_nan=tl.PropagateNan.ALL)
        density = RSQRT_2_PI * tl.exp(-0.5 * square)
        below = 0.5 + 0.5 * tl.erf(z * RSQRT_2)
        h = z * below
        slope = below + z * density
        curve = density * (2.0 - square)
    return h, slope, curve


@triton.jit
def add_product(acc, a, b, CONFIG: tl.constexpr):
    """acc + a b. The interpreter multiplies only fp32 rightly: there the operands are widened."""
    if CONFIG.UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=CONFIG.PRECISION)


@triton.jit
def product_onto(total, a, b, CONFIG: tl.constexpr):
    """total + a b in fp32."""
    if CONFIG.PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    return add_product(total, a, b, CONFIG)


@triton.jit
def product(a, b, CONFIG: tl.constexpr):
    """a b in fp32."""
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    return product_onto(total, a, b, CONFIG)


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
def load_weights(memory, block, LAYER: tl.constexpr, CONFIG: tl.constexpr):
    """[BLOCK_H, BLOCK_D] of w1, or for LAYER 2 of the transpose of w2."""
    row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    at = memory + (LAYER - 1) * CONFIG.HIDDEN * CONFIG.D
    return load_matrix(at, row, tl.arange(0, CONFIG.BLOCK_D), CONFIG.HIDDEN, CONFIG.D)


@triton.jit
def store_weights(memory, x, block, LAYER: tl.constexpr, CONFIG: tl.constexpr):
    row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    at = memory + (LAYER - 1) * CONFIG.HIDDEN * CONFIG.D
    store_matrix(at, x, row, tl.arange(0, CONFIG.BLOCK_D), CONFIG.HIDDEN, CONFIG.D)


@triton.jit
def load_b1(memory, block, CONFIG: tl.constexpr):
    index = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    return load_vector(memory + 2 * CONFIG.HIDDEN * CONFIG.D, index, CONFIG.HIDDEN)


@triton.jit
def load_b2(memory, CONFIG: tl.constexpr):
    at = memory + (2 * CONFIG.HIDDEN * CONFIG.D + CONFIG.HIDDEN)
    return load_vector(at, tl.arange(0, CONFIG.BLOCK_D), CONFIG.D)


@triton.jit
def store_memory(memory, weights, block, CONFIG: tl.constexpr):
    """One block of a memory, (w1^T [BLOCK_D, BLOCK_H], b1, w2 [BLOCK_D, BLOCK_H], b2), stored; b2
    by the first block alone.
    """
    w1, b1, w2, b2 = weights
    store_weights(memory, tl.trans(w1), block, 1, CONFIG)
    store_weights(memory, tl.trans(w2), block, 2, CONFIG)
    row = block * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    tl.store(memory + 2 * CONFIG.HIDDEN * CONFIG.D + row, b1, mask=row < CONFIG.HIDDEN)
    col = tl.arange(0, CONFIG.BLOCK_D)
    at = memory + (2 * CONFIG.HIDDEN * CONFIG.D + CONFIG.HIDDEN) + col
    tl.store(at, b2, mask=(col < CONFIG.D) & (block == 0))


@triton.jit
def token_rows(x, place, there, CONFIG: tl.constexpr):
    """The tokens ``first``, ``first + 1``, ... of one head; zero where they are not ``there``. x
    [B, T, heads, D] is a pointer and the strides of its first axes, ``place`` (batch, head, first).
    """
    x_ptr, batch_stride, token_stride, head_stride = x
    batch, head, first = place
    col = tl.arange(0, CONFIG.BLOCK_D)
    token = (first + tl.arange(0, CONFIG.BLOCK_C)).to(tl.int64)
    start = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    at = x_ptr + start + token[:, None] * token_stride + col[None, :]
    return tl.load(at, mask=there[:, None] & (col < CONFIG.D)[None, :], other=0.0)


@triton.jit
def store_token_rows(x_ptr, x, place, there, tokens, heads, CONFIG: tl.constexpr):
    """The same into a contiguous [B, T, heads, D]."""
    batch, head, first = place
    col = tl.arange(0, CONFIG.BLOCK_D)
    token = (first + tl.arange(0, CONFIG.BLOCK_C)).to(tl.int64)
    row = (batch.to(tl.int64) * tokens + token) * heads + head
    at = x_ptr + row[:, None] * CONFIG.D + col[None, :]
    mask = there[:, None] & (col < CONFIG.D)[None, :]
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=mask)
