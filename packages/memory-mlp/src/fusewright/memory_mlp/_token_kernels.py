"""Triton kernels that leave tokens out: which are finite, what stands where they were, and how many
they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=("tokens", "rows"))
def _finite_tokens_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    present_ptr,
    tokens,
    rows,
    batch_stride,
    row_stride,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program takes ROWS tokens of all rows: x where it is finite and not masked, else 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_WIDTH)
    there = row < rows
    inside = there[:, None] & (col < WIDTH)[None, :]
    at = row // tokens * batch_stride + row % tokens * row_stride
    x = tl.load(x_ptr + at[:, None] + col[None, :], mask=inside, other=0.0)
    present = tl.abs(tl.sum(x.to(tl.float32), 1)) < INFINITY
    if HAS_MASK:
        present = present & (tl.load(mask_ptr + row, mask=there, other=0) != 0)
    y = tl.where(present[:, None], x, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * WIDTH + col[None, :], y, mask=inside)
    tl.store(present_ptr + row, present, mask=there)


@triton.jit(do_not_specialize=("tokens", "rows"))
def _kept_tokens_kernel(
    x_ptr,
    kept_ptr,
    mask_ptr,
    y_ptr,
    other,
    tokens,
    rows,
    batch_stride,
    row_stride,
    FLAGS: tl.constexpr,
    BLOCK_FLAGS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program takes ROWS tokens of all rows: x where all FLAGS of the token are set and
    ``other`` where they are not; 0 where it is masked.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_WIDTH)
    flag = tl.arange(0, BLOCK_FLAGS)
    there = row < rows
    inside = there[:, None] & (col < WIDTH)[None, :]
    flags = tl.load(
        kept_ptr + row[:, None] * FLAGS + flag[None, :],
        mask=there[:, None] & (flag < FLAGS)[None, :],
        other=1,
    )
    kept = tl.min((flags != 0).to(tl.int32), 1) != 0
    at = row // tokens * batch_stride + row % tokens * row_stride
    # What is left out may be anything, and is not looked at.
    x = tl.load(x_ptr + at[:, None] + col[None, :], mask=inside & kept[:, None], other=0.0)
    y = tl.where(kept[:, None], x.to(tl.float32), other)
    if HAS_MASK:
        unmasked = tl.load(mask_ptr + row, mask=there, other=0) != 0
        y = tl.where(unmasked[:, None], y, 0.0)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * WIDTH + col[None, :], y, mask=inside)


@triton.jit(do_not_specialize=("tokens", "heads"))
def _count_tokens_kernel(
    written_ptr,
    skipped_ptr,
    position_ptr,
    mask_ptr,
    lost_ptr,
    now_ptr,
    total_ptr,
    later_ptr,
    tokens,
    heads,
    HAS_MASK: tl.constexpr,
    HAS_LOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program counts the tokens of one row that one head did not write, in all those that are
    not masked, and moves both counters of the state on.
    """
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    missing = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        there = token < tokens
        place = batch * tokens + token
        written = tl.load(written_ptr + place * heads + head, mask=there, other=0) != 0
        given = there
        if HAS_MASK:
            given = tl.load(mask_ptr + place, mask=there, other=0) != 0
        missing += given.to(tl.int32) - written.to(tl.int32)
    at = batch * heads + head
    now = tl.sum(missing, 0).to(tl.int64)
    if HAS_LOST:
        now += tl.load(lost_ptr + at)
    tl.store(now_ptr + at, now)
    tl.store(total_ptr + at, tl.load(skipped_ptr + at) + now)
    if head == 0:
        tl.store(later_ptr + batch, tl.load(position_ptr + batch) + tokens)
