"""Triton kernel of rotary, forward and back.

The parts are rows, rows beside them and a prefix; joined, they are one sequence. Elements come in
vectors, the longest that divide half a row and every stride, so that one access takes up to 16
bytes: columns, strides and offsets are counted in vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(
    first, COUNT: tl.constexpr, KINDS: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr
):
    """Token, kind, head and column of the COUNT vectors from ``first`` on, COLS in each row. Tokens
    in 64 bits, since they are multiplied by strides.
    """
    of_token: tl.constexpr = KINDS * HEADS * COLS
    vector = (first % of_token).to(tl.int32) + tl.arange(0, COUNT)
    token = first // of_token + vector // of_token
    return token, vector // (HEADS * COLS) % KINDS, vector // COLS % HEADS, vector % COLS


@triton.jit
def row_of(batch, token, kind, head, strides):
    """Where the row of a token, kind and head begins."""
    kinds = kind.to(tl.int64) * strides[2] + head.to(tl.int64) * strides[3]
    return batch * strides[0] + token * strides[1] + kinds


@triton.jit
def elements_of(vector, VECTOR: tl.constexpr):
    """Offsets of the elements of each vector, along a further axis."""
    return tl.expand_dims(vector, -1) * VECTOR + tl.arange(0, VECTOR)


@triton.jit
def turned_pairs(x_ptr, at, cos, sin, turns, inside, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """The vectors at ``at`` and half a row further on in fp32, turned where ``turns``."""
    x = tl.load(x_ptr + elements_of(at, VECTOR), mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + elements_of(at + HALF, VECTOR), mask=inside, other=0.0).to(tl.float32)
    # Zero times infinity is NaN: what does not turn is no rotation by zero.
    return tl.where(turns, x * cos - y * sin, x), tl.where(turns, y * cos + x * sin, y)


@triton.jit
def store_pairs(x, y, ptr, at, inside, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """Both halves, rounded, to where ``turned_pairs`` would load them."""
    tl.store(ptr + elements_of(at, VECTOR), x.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + elements_of(at + HALF, VECTOR), y.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def carry_prefix(
    block,
    prefix_ptr,
    joint_ptr,
    prefix_strides,
    joint_strides,
    batches,
    tokens,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
    BATCHES: tl.constexpr,
    BACK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Carry COUNT vectors of a prefix of so many tokens to every row of the batch, or back: if it
    is shared, their sum over the batch.
    """
    token, kind, head, col = place_of(block.to(tl.int64) * COUNT, COUNT, KINDS, HEADS, COLS)
    inside = token < tokens
    prefix_at = col + row_of(0, token, kind, head, prefix_strides)
    joint_at = col + row_of(0, token, kind, head, joint_strides)
    total = tl.zeros((BATCHES, COUNT, VECTOR), tl.float32)
    for start in range(0, batches, BATCHES):
        batch = (start + tl.arange(0, BATCHES)).to(tl.int64)[:, None]
        here = tl.expand_dims(inside[None, :] & (batch < batches), -1)
        of_prefix = prefix_ptr + elements_of(batch * prefix_strides[0] + prefix_at, VECTOR)
        of_joint = joint_ptr + elements_of(batch * joint_strides[0] + joint_at, VECTOR)
        if not BACK:
            tl.store(of_joint, tl.load(of_prefix, mask=here), mask=here)
        elif SHARED:
            total += tl.load(of_joint, mask=here, other=0.0).to(tl.float32)
        else:
            tl.store(of_prefix, tl.load(of_joint, mask=here), mask=here)
    if BACK and SHARED:
        total = tl.sum(total, 0).to(prefix_ptr.dtype.element_ty)
        at = elements_of(prefix_at, VECTOR)
        tl.store(prefix_ptr + at, total, mask=tl.expand_dims(inside, -1))


@triton.jit
def turn_rows(
    block,
    rows_ptr,
    beside_ptr,
    joint_ptr,
    cos_ptr,
    sin_ptr,
    rows_strides,
    beside_strides,
    joint_strides,
    cos_stride,
    sin_stride,
    tokens,
    prefix_tokens,
    token_blocks,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
    BACK: tl.constexpr,
):
    """Turn COUNT vectors of the first halves of rows of one row of the batch with their second
    halves, and those beside them, to their places in the joint sequence, or back from there.
    """
    batch = (block // token_blocks).to(tl.int64)
    first = (block % token_blocks).to(tl.int64) * COUNT
    token, kind, head, col = place_of(first, COUNT, KINDS, HEADS, HALF)
    inside = (token < tokens)[:, None]
    turns = (kind == 0)[:, None]
    cos_at = elements_of(token * cos_stride + col, VECTOR)
    sin_at = elements_of(token * sin_stride + col, VECTOR)
    cos = tl.load(cos_ptr + cos_at, mask=inside & turns, other=1.0)
    sin = tl.load(sin_ptr + sin_at, mask=inside & turns, other=0.0)
    if BACK:
        sin = -sin

    rows_at = col + row_of(batch, token, kind, head, rows_strides)
    joint_token = prefix_tokens + token * (1 if beside_ptr is None else 2)
    joint_at = col + row_of(batch, joint_token, kind, head, joint_strides)
    # All is loaded before anything is stored: a program waits for its memory once.
    if BACK:
        x, y = turned_pairs(joint_ptr, joint_at, cos, sin, turns, inside, HALF, VECTOR)
    else:
        x, y = turned_pairs(rows_ptr, rows_at, cos, sin, turns, inside, HALF, VECTOR)
    if beside_ptr is not None:
        beside_at = col + row_of(batch, token, kind, head, beside_strides)
        next_at = joint_at + joint_strides[1]
        if BACK:
            v, w = turned_pairs(joint_ptr, next_at, cos, sin, turns, inside, HALF, VECTOR)
            store_pairs(v, w, beside_ptr, beside_at, inside, HALF, VECTOR)
        else:
            v, w = turned_pairs(beside_ptr, beside_at, cos, sin, turns, inside, HALF, VECTOR)
            store_pairs(v, w, joint_ptr, next_at, inside, HALF, VECTOR)
    if BACK:
        store_pairs(x, y, rows_ptr, rows_at, inside, HALF, VECTOR)
    else:
        store_pairs(x, y, joint_ptr, joint_at, inside, HALF, VECTOR)


@triton.jit
def _rotary_kernel(
    rows_ptr,
    beside_ptr,
    prefix_ptr,
    joint_ptr,
    cos_ptr,
    sin_ptr,
    rows_batch_stride,
    rows_token_stride,
    rows_kind_stride,
    rows_head_stride,
    beside_batch_stride,
    beside_token_stride,
    beside_kind_stride,
    beside_head_stride,
    prefix_batch_stride,
    prefix_token_stride,
    prefix_kind_stride,
    prefix_head_stride,
    joint_batch_stride,
    joint_token_stride,
    joint_kind_stride,
    joint_head_stride,
    cos_stride,
    sin_stride,
    batches,
    tokens,
    prefix_tokens,
    prefix_blocks,
    token_blocks,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
    PREFIX_COUNT: tl.constexpr,
    BATCHES: tl.constexpr,
    BACK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One program carries COUNT pairs of vectors, and those beside them, between their parts and
    the joint sequence; the first programs do so with the prefix.
    """
    prefix_strides = (
        prefix_batch_stride,
        prefix_token_stride,
        prefix_kind_stride,
        prefix_head_stride,
    )
    joint_strides = (joint_batch_stride, joint_token_stride, joint_kind_stride, joint_head_stride)
    block = tl.program_id(0)
    if prefix_ptr is not None and block < prefix_blocks:
        carry_prefix(
            block,
            prefix_ptr,
            joint_ptr,
            prefix_strides,
            joint_strides,
            batches,
            prefix_tokens,
            KINDS,
            HEADS,
            2 * HALF,
            VECTOR,
            PREFIX_COUNT,
            BATCHES,
            BACK,
            SHARED,
        )
    if block >= prefix_blocks:
        turn_rows(
            block - prefix_blocks,
            rows_ptr,
            beside_ptr,
            joint_ptr,
            cos_ptr,
            sin_ptr,
            (rows_batch_stride, rows_token_stride, rows_kind_stride, rows_head_stride),
            (beside_batch_stride, beside_token_stride, beside_kind_stride, beside_head_stride),
            joint_strides,
            cos_stride,
            sin_stride,
            tokens,
            prefix_tokens,
            token_blocks,
            KINDS,
            HEADS,
            HALF,
            VECTOR,
            COUNT,
            BACK,
        )
