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
    zeros,
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
    CONFIG: tl.constexpr,
):
    """One program reads for BLOCK_C tokens of one head."""
    own = (tl.program_id(0) // chunks).to(tl.int64)
    first = tl.program_id(0) % chunks * CONFIG.BLOCK_C
    place = own // heads, own % heads, first
    there = tl.arange(0, CONFIG.BLOCK_C) < tokens - first
    q = token_rows((q_ptr, q_batch_stride, q_token_stride, q_head_stride), place, there, CONFIG)
    memory = state_ptr + own * (CONFIG.HALVES * CONFIG.SIZE)
    y = zeros(CONFIG.BLOCK_D, CONFIG.BLOCK_C)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        w1 = load_weights(memory, block, 1, CONFIG).to(q.dtype)
        b1 = load_b1(memory, block, CONFIG)
        w2 = load_weights(memory, block, 2, CONFIG).to(q.dtype)
        z = product(w1, tl.trans(q), CONFIG) + b1[:, None]
        h, _, _ = activated(z, CONFIG)
        y = product_onto(y, tl.trans(w2), h.to(q.dtype), CONFIG)
    y = tl.trans(y) + load_b2(memory, CONFIG)[None, :]
    store_token_rows(y_ptr, y, place, there, tokens, heads, CONFIG)


@triton.jit
def queries_gradient(
    dy, q, state_ptr, dq_ptr, program, tokens, heads, chunks, CONFIG: tl.constexpr
):
    """The gradient of BLOCK_C queries of one head; dy and q as ``token_rows`` takes them."""
    own = (program // chunks).to(tl.int64)
    first = program % chunks * CONFIG.BLOCK_C
    place = own // heads, own % heads, first
    there = tl.arange(0, CONFIG.BLOCK_C) < tokens - first
    q = token_rows(q, place, there, CONFIG)
    dy = token_rows(dy, place, there, CONFIG)
    memory = state_ptr + own * (CONFIG.HALVES * CONFIG.SIZE)
    dq = zeros(CONFIG.BLOCK_D, CONFIG.BLOCK_C)
    for block in tl.range(0, CONFIG.BLOCKS, num_stages=1):
        w1 = load_weights(memory, block, 1, CONFIG).to(q.dtype)
        b1 = load_b1(memory, block, CONFIG)
        w2 = load_weights(memory, block, 2, CONFIG).to(q.dtype)
        z = product(w1, tl.trans(q), CONFIG) + b1[:, None]
        _, slope, _ = activated(z, CONFIG)
        dz = product(w2, tl.trans(dy), CONFIG) * slope
        dq = product_onto(dq, tl.trans(w1), dz.to(q.dtype), CONFIG)
    store_token_rows(dq_ptr, tl.trans(dq), place, there, tokens, heads, CONFIG)


@triton.jit
def weights_gradient(
    dy_at,
    q_at,
    state_ptr,
    dstate_ptr,
    program,
    tokens,
    heads,
    chunks,
    all_heads,
    split_chunks,
    CONFIG: tl.constexpr,
):
    """The gradient of the weights of BLOCK_H hidden units of one head, from ``split_chunks`` chunks
    of BLOCK_C tokens; the momentum's is zero. With SPLIT it is a partial sum, stored in [splits,
    all heads, SIZE].
    """
    C: tl.constexpr = CONFIG.BLOCK_C
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    UNITS: tl.constexpr = CONFIG.BLOCK_H
    DTYPE: tl.constexpr = q_at[0].dtype.element_ty
    block = program % CONFIG.BLOCKS
    split = program // CONFIG.BLOCKS // all_heads
    own = (program // CONFIG.BLOCKS % all_heads).to(tl.int64)
    batch = own // heads
    head = own % heads
    memory = state_ptr + own * (CONFIG.HALVES * CONFIG.SIZE)
    w1 = load_weights(memory, block, 1, CONFIG).to(DTYPE)
    b1 = load_b1(memory, block, CONFIG)
    w2 = load_weights(memory, block, 2, CONFIG).to(DTYPE)
    dw1 = tl.zeros([BLOCK_D, UNITS], tl.float32)
    dw2 = tl.zeros([BLOCK_D, UNITS], tl.float32)
    # The biases' gradients, added over the tokens of a tile at the end.
    db1 = tl.zeros([C, UNITS], tl.float32)
    # That of b2 is the iteration's last product, where dy is no wider than an operand: so dy's tile
    # is in use to the end. Where dz's tile took its place, ptxas 12.8 lost its address.
    NARROW: tl.constexpr = q_at[0].dtype.element_ty != tl.float32
    if NARROW:
        db2 = tl.zeros([BLOCK_D, COPIES], tl.float32)
        ones = tl.full([C, COPIES], 1.0, tl.float32).to(DTYPE)
    else:
        db2 = tl.zeros([BLOCK_D, C], tl.float32)
    last = tl.minimum((split + 1) * split_chunks, chunks)
    for chunk in tl.range(split * split_chunks, last, num_stages=CONFIG.NUM_STAGES):
        first = chunk * C
        there = tl.arange(0, C) < tokens - first
        q = token_rows(q_at, (batch, head, first), there, CONFIG)
        z = product(q, tl.trans(w1), CONFIG) + b1[None, :]
        h, slope, _ = activated(z, CONFIG)
        dy = token_rows(dy_at, (batch, head, first), there, CONFIG)
        dw2 = product_onto(dw2, tl.trans(dy), h.to(q.dtype), CONFIG)
        dz = product(dy, tl.trans(w2), CONFIG) * slope
        dw1 = product_onto(dw1, tl.trans(q), dz.to(q.dtype), CONFIG)
        db1 += dz
        if NARROW:
            db2 = product_onto(db2, tl.trans(dy), ones, CONFIG)
        else:
            db2 += tl.trans(dy).to(tl.float32)
    db2 = tl.sum(db2, 1)
    if NARROW:
        db2 = db2 / COPIES
    place = own * CONFIG.HALVES
    if CONFIG.SPLIT:
        place = split * all_heads + own
    target = dstate_ptr + place * CONFIG.SIZE
    store_memory(target, (dw1, tl.sum(db1, 0), dw2, db2), block, CONFIG)
    if CONFIG.HALVES == 2 and not CONFIG.SPLIT:
        none = tl.zeros([BLOCK_D, UNITS], tl.float32)
        no_b1, no_b2 = tl.zeros([UNITS], tl.float32), tl.zeros([BLOCK_D], tl.float32)
        store_memory(target + CONFIG.SIZE, (none, no_b1, none, no_b2), block, CONFIG)


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
    QUERIES: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """The first programs, which take longest, compute the weights' gradient, the others the
    queries', each with a CONFIG of their own; a gradient that is not needed has neither programs
    nor a tensor.
    """
    program = tl.program_id(0)
    dy = dy_ptr, dy_batch_stride, dy_token_stride, dy_head_stride
    q = q_ptr, q_batch_stride, q_token_stride, q_head_stride
    if dstate_ptr is not None and program < weight_programs:
        weights_gradient(
            dy, q, state_ptr, dstate_ptr,
            program, tokens, heads, chunks, all_heads, split_chunks, WEIGHTS,
        )  # fmt: skip
    if dq_ptr is not None and program >= weight_programs:
        program -= weight_programs
        queries_gradient(dy, q, state_ptr, dq_ptr, program, tokens, heads, chunks, QUERIES)


@triton.jit(do_not_specialize=COUNTS)
def read_sum_kernel(
    parts_ptr,
    dstate_ptr,
    numbers,
    splits,
    CONFIG: tl.constexpr,
):
    """One program adds the partial sums of BLOCK of all heads' ``numbers``, in their order."""
    index = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)
    inside = index < numbers
    total = tl.load(parts_ptr + index, mask=inside, other=0.0)
    for split in tl.range(1, splits):
        at = parts_ptr + tl.cast(split, tl.int64) * numbers + index
        total += tl.load(at, mask=inside, other=0.0)
    at = dstate_ptr + index // CONFIG.SIZE * (CONFIG.HALVES * CONFIG.SIZE) + index % CONFIG.SIZE
    tl.store(at, total, mask=inside)
    if CONFIG.HALVES == 2:
        tl.store(at + CONFIG.SIZE, tl.zeros_like(total), mask=inside)
