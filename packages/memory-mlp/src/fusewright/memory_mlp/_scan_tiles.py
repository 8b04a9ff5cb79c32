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
def load_memory(
    memory,
    block,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One block of a memory: (w1^T [BLOCK_D, BLOCK_H], b1, w2 [BLOCK_D, BLOCK_H], b2)."""
    return (
        tl.trans(load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H)),
        load_b1(memory, block, D, HIDDEN, BLOCK_H),
        tl.trans(load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H)),
        load_b2(memory, D, HIDDEN, BLOCK_D),
    )


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
def _added(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def sums(a, b):
    """The sums of a and of b over their rows, in one walk."""
    return tl.reduce((a, b), 0, _added)


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
def tiles_at(
    parts_ptr,
    own,
    step,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Where the first of a head's tiles of a step lies."""
    row = tl.arange(0, BLOCK_C)[:, None]
    col = tl.arange(0, BLOCK_D)[None, :]
    first = (own * 2 + step % 2) * (BLOCKS * BLOCK_C * BLOCK_D)
    return parts_ptr + first + row * BLOCK_D + col


@triton.jit
def hand_in(
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
    """One of the tiles that ``sum_of_all`` adds. The programs of a head are one after the other in
    the grid. Each puts its tile where all see it and counts itself in.

    Tiles of two steps are kept: who writes the next but one has seen all others come to the next,
    past their reading of this one.
    """
    at = tiles_at(parts_ptr, own, step, BLOCKS, BLOCK_C, BLOCK_D)
    tl.store(at + block * (BLOCK_C * BLOCK_D), x)
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr + own, 1, sem="acq_rel")


@triton.jit
def sum_of_all(
    parts_ptr,
    arrived_ptr,
    own,
    step,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The sum of the tiles of all programs of a head, in their order, so that it is the same in all
    of them; waits until as many have come in this step as there are.
    """
    arrived = tl.atomic_add(arrived_ptr + own, 0, sem="acquire")
    while arrived < (step + 1) * BLOCKS:
        arrived = tl.atomic_add(arrived_ptr + own, 0, sem="acquire")
    tl.debug_barrier()
    at = tiles_at(parts_ptr, own, step, BLOCKS, BLOCK_C, BLOCK_D)
    # Past the first cache, which may still hold what lay there two steps ago.
    total = tl.load(at, cache_modifier=".cg")
    for other in tl.static_range(1, BLOCKS):
        total += tl.load(at + other * (BLOCK_C * BLOCK_D), cache_modifier=".cg")
    return total
