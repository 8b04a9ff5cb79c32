"""What the kernels of the scan have in common: tiles of a chunk, blocks of the memory's weights,
the products between them.

A memory and its momentum lie packed as [2, SIZE], each w1 [HIDDEN, D], w2 [D, HIDDEN], b1 [HIDDEN],
b2 [D] one after the other: ``memory`` is a pointer to the first number of one of the two. A tile of
tokens is [BLOCK_C, BLOCK_D], one of the hidden layer [BLOCK_C, BLOCK_H], of the block ``block`` of
HIDDEN / BLOCK_H.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._update_tiles import add_product, to_tf32

# The gradient of |M(k) - v|^2 by M(k) is this times the residual.
FACTOR = tl.constexpr(2.0)


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
def hidden_of(
    x,
    memory,
    block,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """x w1^T + b1, one block of the hidden layer, [BLOCK_C, BLOCK_H]."""
    w1 = load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H).to(x.dtype)
    b1 = load_b1(memory, block, D, HIDDEN, BLOCK_H)
    return product(x, tl.trans(w1), UPCAST, PRECISION) + b1[None, :]


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


@triton.jit
def load_written(
    written_ptr,
    batch,
    head,
    first,
    there,
    tokens,
    heads,
    HAS_MASK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Which tokens of a chunk are there and are written."""
    written = there
    if HAS_MASK:
        token = (first + tl.arange(0, BLOCK_C)).to(tl.int64)
        row = (batch.to(tl.int64) * tokens + token) * heads + head
        written = there & (tl.load(written_ptr + row, mask=there, other=0) != 0)
    return written


@triton.jit
def summed_over_blocks(
    x,
    parts_ptr,
    arrived_ptr,
    own,
    block,
    step,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sum of the tiles of all programs of a head, which are one after the other in the grid, in
    their order; the same in all of them.

    Every program puts its tile where all see it, counts itself in and waits until as many have come
    in this step as there are. Tiles of two steps are kept: who writes the next but one has seen all
    others come to the next, past their reading of this one.
    """
    TILE: tl.constexpr = BLOCK_C * BLOCK_D
    row = tl.arange(0, BLOCK_C)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    at = parts_ptr + (own * 2 + step % 2) * (BLOCKS * TILE) + row * BLOCK_D + col
    tl.store(at + block * TILE, x)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + own, 1, sem="acq_rel") + 1
    while arrived < (step + 1) * BLOCKS:
        arrived = tl.atomic_add(arrived_ptr + own, 0, sem="acquire")
    tl.debug_barrier()
    # Past the first cache, which may still hold what lay there two steps ago.
    total = tl.load(at, cache_modifier=".cg")
    for other in tl.static_range(1, BLOCKS):
        total += tl.load(at + other * TILE, cache_modifier=".cg")
    return total
