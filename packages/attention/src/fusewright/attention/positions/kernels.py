"""Triton kernel of rotary, forward and backward.

    r'_i         = r_i cos_ti - r_{i + D/2} sin_ti              i < D/2
    r'_{i + D/2} = r_{i + D/2} cos_ti + r_i sin_ti

The parts are rows, the rows beside them (the second operand) and a prefix; joined, they are one
sequence. Elements come in vectors, the longest that divide half a row and all strides, so that one
access takes up to 16 bytes: columns, strides and offsets are counted in vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(
    first, COUNT: tl.constexpr, KINDS: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr
):
    """Token, row of K, head, column of the COUNT vectors from ``first`` on, COLS in each row.
    Tokens are 64-bit, since they are multiplied by strides.
    """
    per_token: tl.constexpr = KINDS * HEADS * COLS
    vector = (first % per_token).to(tl.int32) + tl.arange(0, COUNT)
    token = first // per_token + vector // per_token
    return token, vector // (HEADS * COLS) % KINDS, vector // COLS % HEADS, vector % COLS


@triton.jit
def row_of(batch, token, kind, head, strides):
    """Where the row of a token, number in K and head begins."""
    kinds = kind.to(tl.int64) * strides[2] + head.to(tl.int64) * strides[3]
    return batch * strides[0] + token * strides[1] + kinds


@triton.jit
def elements_of(vector, VECTOR: tl.constexpr):
    """Offsets of the elements of each vector, along a further axis."""
    return tl.expand_dims(vector, -1) * VECTOR + tl.arange(0, VECTOR)


@triton.jit
def rotated_pairs(x_ptr, at, cos, sin, rotates, inside, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """The vectors at ``at`` and half a row further on in fp32, rotated where ``rotates``."""
    x = tl.load(x_ptr + elements_of(at, VECTOR), mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + elements_of(at + HALF, VECTOR), mask=inside, other=0.0).to(tl.float32)
    # Zero times infinity is NaN: a rotation by zero would not keep values as they are.
    return tl.where(rotates, x * cos - y * sin, x), tl.where(rotates, y * cos + x * sin, y)


@triton.jit
def store_pairs(x, y, ptr, at, inside, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """Both halves, rounded, to where ``rotated_pairs`` would load them."""
    tl.store(ptr + elements_of(at, VECTOR), x.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + elements_of(at + HALF, VECTOR), y.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def copy_prefix(block, prefix, joint, batches, tokens, CONFIG: tl.constexpr):
    """Copy PREFIX_COUNT vectors of a prefix of so many tokens to each row of the batch, or back: of
    a shared prefix, their sum over the batch. Each operand is a pointer and strides.
    """
    prefix_ptr, prefix_strides = prefix
    joint_ptr, joint_strides = joint
    COUNT: tl.constexpr = CONFIG.PREFIX_COUNT
    VECTOR: tl.constexpr = CONFIG.VECTOR
    BATCHES: tl.constexpr = CONFIG.BATCHES
    token, kind, head, col = place_of(
        block.to(tl.int64) * COUNT, COUNT, CONFIG.KINDS, CONFIG.HEADS, 2 * CONFIG.HALF
    )
    inside = token < tokens
    prefix_at = col + row_of(0, token, kind, head, prefix_strides)
    joint_at = col + row_of(0, token, kind, head, joint_strides)
    total = tl.zeros((BATCHES, COUNT, VECTOR), tl.float32)
    for start in range(0, batches, BATCHES):
        batch = (start + tl.arange(0, BATCHES)).to(tl.int64)[:, None]
        inside_rows = tl.expand_dims(inside[None, :] & (batch < batches), -1)
        of_prefix = prefix_ptr + elements_of(batch * prefix_strides[0] + prefix_at, VECTOR)
        of_joint = joint_ptr + elements_of(batch * joint_strides[0] + joint_at, VECTOR)
        if not CONFIG.BACKWARD:
            tl.store(of_joint, tl.load(of_prefix, mask=inside_rows), mask=inside_rows)
        elif CONFIG.SHARED:
            total += tl.load(of_joint, mask=inside_rows, other=0.0).to(tl.float32)
        else:
            tl.store(of_prefix, tl.load(of_joint, mask=inside_rows), mask=inside_rows)
    if CONFIG.BACKWARD and CONFIG.SHARED:
        total = tl.sum(total, 0).to(prefix_ptr.dtype.element_ty)
        at = elements_of(prefix_at, VECTOR)
        tl.store(prefix_ptr + at, total, mask=tl.expand_dims(inside, -1))


@triton.jit
def rotate_rows(
    block, rows, beside, joint, cos, sin, tokens, prefix_tokens, token_blocks, CONFIG: tl.constexpr
):
    """Rotate COUNT vectors of the first halves of rows of one row of the batch with their second
    halves, and those of the second operand, to their places in the joint sequence, or back from
    there.
    """
    rows_ptr, rows_strides = rows
    beside_ptr, beside_strides = beside
    joint_ptr, joint_strides = joint
    cos_ptr, cos_strides = cos
    sin_ptr, sin_strides = sin
    HALF: tl.constexpr = CONFIG.HALF
    VECTOR: tl.constexpr = CONFIG.VECTOR
    batch = (block // token_blocks).to(tl.int64)
    first = (block % token_blocks).to(tl.int64) * CONFIG.COUNT
    token, kind, head, col = place_of(first, CONFIG.COUNT, CONFIG.KINDS, CONFIG.HEADS, HALF)
    inside = (token < tokens)[:, None]
    rotates = (kind == 0)[:, None]
    cos_at = elements_of(batch * cos_strides[0] + token * cos_strides[1] + col, VECTOR)
    sin_at = elements_of(batch * sin_strides[0] + token * sin_strides[1] + col, VECTOR)
    cos = tl.load(cos_ptr + cos_at, mask=inside & rotates, other=1.0)
    sin = tl.load(sin_ptr + sin_at, mask=inside & rotates, other=0.0)
    if CONFIG.BACKWARD:
        sin = -sin

    rows_at = col + row_of(batch, token, kind, head, rows_strides)
    joint_token = prefix_tokens + token * (1 if beside_ptr is None else 2)
    joint_at = col + row_of(batch, joint_token, kind, head, joint_strides)
    # All loads come before the stores: a program waits for memory once.
    if CONFIG.BACKWARD:
        x, y = rotated_pairs(joint_ptr, joint_at, cos, sin, rotates, inside, HALF, VECTOR)
    else:
        x, y = rotated_pairs(rows_ptr, rows_at, cos, sin, rotates, inside, HALF, VECTOR)
    if beside_ptr is not None:
        beside_at = col + row_of(batch, token, kind, head, beside_strides)
        next_at = joint_at + joint_strides[1]
        if CONFIG.BACKWARD:
            v, w = rotated_pairs(joint_ptr, next_at, cos, sin, rotates, inside, HALF, VECTOR)
            store_pairs(v, w, beside_ptr, beside_at, inside, HALF, VECTOR)
        else:
            v, w = rotated_pairs(beside_ptr, beside_at, cos, sin, rotates, inside, HALF, VECTOR)
            store_pairs(v, w, joint_ptr, next_at, inside, HALF, VECTOR)
    if CONFIG.BACKWARD:
        store_pairs(x, y, rows_ptr, rows_at, inside, HALF, VECTOR)
    else:
        store_pairs(x, y, joint_ptr, joint_at, inside, HALF, VECTOR)


@triton.jit
def rotary_kernel(
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
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    batches,
    tokens,
    prefix_tokens,
    prefix_blocks,
    token_blocks,
    CONFIG: tl.constexpr,
):
    """One program rotates COUNT pairs of vectors, and those of the second operand, between their
    parts and the joint sequence; the first programs copy the prefix.
    """
    rows = rows_ptr, (rows_batch_stride, rows_token_stride, rows_kind_stride, rows_head_stride)
    beside = (
        beside_ptr,
        (beside_batch_stride, beside_token_stride, beside_kind_stride, beside_head_stride),
    )
    prefix = (
        prefix_ptr,
        (prefix_batch_stride, prefix_token_stride, prefix_kind_stride, prefix_head_stride),
    )
    joint = (
        joint_ptr,
        (joint_batch_stride, joint_token_stride, joint_kind_stride, joint_head_stride),
    )
    block = tl.program_id(0)
    if prefix_ptr is not None and block < prefix_blocks:
        copy_prefix(block, prefix, joint, batches, prefix_tokens, CONFIG)
    if block >= prefix_blocks:
        rotate_rows(
            *(block - prefix_blocks, rows, beside, joint),
            (cos_ptr, (cos_batch_stride, cos_token_stride)),
            (sin_ptr, (sin_batch_stride, sin_token_stride)),
            *(tokens, prefix_tokens, token_blocks, CONFIG),
        )
