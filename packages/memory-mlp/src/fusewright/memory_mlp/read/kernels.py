"""Triton kernels that read a memory, and of their backward pass: M(q) = w2 act(w1 q + b1) + b2 for
every row and head, weights packed as in common/tiles.py, HALVES of them for a head.

A program's tiles of q and dy stand on the right of every product inside the loop over hidden units:
a left operand would be held in registers, and ptxas overwrites them although the next iteration
needs them. So tiles of the hidden layer are [BLOCK_H, C] there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    activated,
    load_b1,
    load_b2,
    load_weights,
    product,
    product_onto,
    store_memory,
    store_token_rows,
    token_rows,
)

# A product takes no fewer columns.
COPIES = tl.constexpr(16)
COUNTS = (
    "tokens",
    "heads",
    "chunks",
    "weight_programs",
    "all_heads",
    "split_chunks",
    "numbers",
    "splits",
)


@triton.jit(do_not_specialize=COUNTS)
def read_kernel(
    q_ptr,
    state_ptr,
    y_ptr,
    tokens,
    heads,
    chunks,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program reads for C tokens of one head."""
    SIZE: tl.constexpr = 2 * HIDDEN * D + HIDDEN + D
    own = (tl.program_id(0) // chunks).to(tl.int64)
    batch = own // heads
    head = own % heads
    first = tl.program_id(0) % chunks * C
    there = tl.arange(0, C) < tokens - first
    q = token_rows(
        q_ptr, q_batch_stride, q_token_stride, q_head_stride,
        batch, head, first, there, D, C, BLOCK_D,
    )  # fmt: skip
    memory = state_ptr + own * (HALVES * SIZE)
    y = tl.zeros([BLOCK_D, C], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        w1 = load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H).to(q.dtype)
        b1 = load_b1(memory, block, D, HIDDEN, BLOCK_H)
        w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H).to(q.dtype)
        z = product(w1, tl.trans(q), UPCAST, PRECISION) + b1[:, None]
        h, _, _ = activated(z, ACTIVATION)
        y = product_onto(y, tl.trans(w2), h.to(q.dtype), UPCAST, PRECISION)
    y = tl.trans(y) + load_b2(memory, D, HIDDEN, BLOCK_D)[None, :]
    store_token_rows(y_ptr, y, batch, head, first, there, tokens, heads, D, C, BLOCK_D)


@triton.jit
def queries_gradient(
    dy_ptr,
    q_ptr,
    state_ptr,
    dq_ptr,
    program,
    tokens,
    heads,
    chunks,
    dy_batch_stride,
    dy_token_stride,
    dy_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The gradient of C queries of one head."""
    SIZE: tl.constexpr = 2 * HIDDEN * D + HIDDEN + D
    own = (program // chunks).to(tl.int64)
    batch = own // heads
    head = own % heads
    first = program % chunks * C
    there = tl.arange(0, C) < tokens - first
    q = token_rows(
        q_ptr, q_batch_stride, q_token_stride, q_head_stride,
        batch, head, first, there, D, C, BLOCK_D,
    )  # fmt: skip
    dy = token_rows(
        dy_ptr, dy_batch_stride, dy_token_stride, dy_head_stride,
        batch, head, first, there, D, C, BLOCK_D,
    )  # fmt: skip
    memory = state_ptr + own * (HALVES * SIZE)
    dq = tl.zeros([BLOCK_D, C], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        w1 = load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, BLOCK_H).to(q.dtype)
        b1 = load_b1(memory, block, D, HIDDEN, BLOCK_H)
        w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, BLOCK_H).to(q.dtype)
        z = product(w1, tl.trans(q), UPCAST, PRECISION) + b1[:, None]
        _, slope, _ = activated(z, ACTIVATION)
        dz = product(w2, tl.trans(dy), UPCAST, PRECISION) * slope
        dq = product_onto(dq, tl.trans(w1), dz.to(q.dtype), UPCAST, PRECISION)
    store_token_rows(dq_ptr, tl.trans(dq), batch, head, first, there, tokens, heads, D, C, BLOCK_D)


@triton.jit
def weights_gradient(
    dy_ptr,
    q_ptr,
    state_ptr,
    dstate_ptr,
    program,
    tokens,
    heads,
    chunks,
    all_heads,
    split_chunks,
    dy_batch_stride,
    dy_token_stride,
    dy_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The gradient of the weights of UNITS hidden units of one head, from ``split_chunks`` chunks
    of C tokens; the momentum's is zero. With SPLIT it is a partial sum, stored in [splits, all
    heads, SIZE].
    """
    SIZE: tl.constexpr = 2 * HIDDEN * D + HIDDEN + D
    block = program % UNIT_BLOCKS
    split = program // UNIT_BLOCKS // all_heads
    own = (program // UNIT_BLOCKS % all_heads).to(tl.int64)
    batch = own // heads
    head = own % heads
    memory = state_ptr + own * (HALVES * SIZE)
    w1 = load_weights(memory, block, 1, D, HIDDEN, BLOCK_D, UNITS).to(q_ptr.dtype.element_ty)
    b1 = load_b1(memory, block, D, HIDDEN, UNITS)
    w2 = load_weights(memory, block, 2, D, HIDDEN, BLOCK_D, UNITS).to(q_ptr.dtype.element_ty)
    dw1 = tl.zeros([BLOCK_D, UNITS], tl.float32)
    dw2 = tl.zeros([BLOCK_D, UNITS], tl.float32)
    # The biases' gradients, added over the tokens of a tile at the end.
    db1 = tl.zeros([C, UNITS], tl.float32)
    # That of b2 is the iteration's last product, where dy is no wider than an operand: so dy's tile
    # is in use to the end. Where dz's tile took its place, ptxas 12.8 lost its address.
    NARROW: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    if NARROW:
        db2 = tl.zeros([BLOCK_D, COPIES], tl.float32)
        ones = tl.full([C, COPIES], 1.0, tl.float32).to(q_ptr.dtype.element_ty)
    else:
        db2 = tl.zeros([BLOCK_D, C], tl.float32)
    last = tl.minimum((split + 1) * split_chunks, chunks)
    for chunk in tl.range(split * split_chunks, last, num_stages=NUM_STAGES):
        first = chunk * C
        there = tl.arange(0, C) < tokens - first
        q = token_rows(
            q_ptr, q_batch_stride, q_token_stride, q_head_stride,
            batch, head, first, there, D, C, BLOCK_D,
        )  # fmt: skip
        z = product(q, tl.trans(w1), UPCAST, PRECISION) + b1[None, :]
        h, slope, _ = activated(z, ACTIVATION)
        dy = token_rows(
            dy_ptr, dy_batch_stride, dy_token_stride, dy_head_stride,
            batch, head, first, there, D, C, BLOCK_D,
        )  # fmt: skip
        dw2 = product_onto(dw2, tl.trans(dy), h.to(q.dtype), UPCAST, PRECISION)
        dz = product(dy, tl.trans(w2), UPCAST, PRECISION) * slope
        dw1 = product_onto(dw1, tl.trans(q), dz.to(q.dtype), UPCAST, PRECISION)
        db1 += dz
        if NARROW:
            db2 = product_onto(db2, tl.trans(dy), ones, UPCAST, PRECISION)
        else:
            db2 += tl.trans(dy).to(tl.float32)
    db2 = tl.sum(db2, 1)
    if NARROW:
        db2 = db2 / COPIES
    place = own * HALVES
    if SPLIT:
        place = split * all_heads + own
    target = dstate_ptr + place * SIZE
    store_memory(target, dw1, tl.sum(db1, 0), dw2, db2, block, D, HIDDEN, BLOCK_D, UNITS)
    if HALVES == 2 and not SPLIT:
        none = tl.zeros([BLOCK_D, UNITS], tl.float32)
        no_b1, no_b2 = tl.zeros([UNITS], tl.float32), tl.zeros([BLOCK_D], tl.float32)
        store_memory(target + SIZE, none, no_b1, none, no_b2, block, D, HIDDEN, BLOCK_D, UNITS)


@triton.jit(do_not_specialize=COUNTS)
def read_backward_kernel(
    dy_ptr,
    q_ptr,
    state_ptr,
    dq_ptr,
    dstate_ptr,
    tokens,
    heads,
    chunks,
    weight_programs,
    all_heads,
    split_chunks,
    dy_batch_stride,
    dy_token_stride,
    dy_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The first programs, which take longest, compute the weights' gradient, the others the
    queries'; a gradient that is not needed has neither programs nor a tensor.
    """
    program = tl.program_id(0)
    if dstate_ptr is not None and program < weight_programs:
        weights_gradient(
            dy_ptr, q_ptr, state_ptr, dstate_ptr,
            program, tokens, heads, chunks, all_heads, split_chunks,
            dy_batch_stride, dy_token_stride, dy_head_stride,
            q_batch_stride, q_token_stride, q_head_stride,
            UPCAST, PRECISION, ACTIVATION, HALVES, SPLIT,
            C, D, HIDDEN, BLOCK_D, UNITS, UNIT_BLOCKS, NUM_STAGES,
        )  # fmt: skip
    if dq_ptr is not None and program >= weight_programs:
        queries_gradient(
            dy_ptr, q_ptr, state_ptr, dq_ptr,
            program - weight_programs, tokens, heads, chunks,
            dy_batch_stride, dy_token_stride, dy_head_stride,
            q_batch_stride, q_token_stride, q_head_stride,
            UPCAST, PRECISION, ACTIVATION, HALVES,
            C, D, HIDDEN, BLOCK_D, BLOCK_H, BLOCKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def read_sum_kernel(
    parts_ptr,
    dstate_ptr,
    numbers,
    splits,
    HALVES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds the partial sums of BLOCK of all heads' ``numbers``, in their order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numbers
    total = tl.load(parts_ptr + index, mask=inside, other=0.0)
    for split in tl.range(1, splits):
        at = parts_ptr + tl.cast(split, tl.int64) * numbers + index
        total += tl.load(at, mask=inside, other=0.0)
    at = dstate_ptr + index // SIZE * (HALVES * SIZE) + index % SIZE
    tl.store(at, total, mask=inside)
    if HALVES == 2:
        tl.store(at + SIZE, tl.zeros([BLOCK], tl.float32), mask=inside)
