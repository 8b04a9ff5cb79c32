"""A Triton kernel that casts several tensors at once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast_block(x_ptr, y_ptr, numel, first, BLOCK: tl.constexpr):
    """A tensor's blocks are those of the programs from ``first`` on; returns the one behind its
    last.
    """
    block = tl.program_id(0) - first
    blocks = tl.cdiv(numel, BLOCK)
    if (block >= 0) & (block < blocks):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < numel)
        tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < numel)
    return first + blocks


@triton.jit
def cast_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    x4_ptr,
    x5_ptr,
    y0_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
    y4_ptr,
    y5_ptr,
    numel0,
    numel1,
    numel2,
    numel3,
    numel4,
    numel5,
    BLOCK: tl.constexpr,
):
    """Up to six tensors, each program a block of one of them. A tensor that is absent has no
    elements.
    """
    first = cast_block(x0_ptr, y0_ptr, numel0, 0, BLOCK)
    if x1_ptr is not None:
        first = cast_block(x1_ptr, y1_ptr, numel1, first, BLOCK)
    if x2_ptr is not None:
        first = cast_block(x2_ptr, y2_ptr, numel2, first, BLOCK)
    if x3_ptr is not None:
        first = cast_block(x3_ptr, y3_ptr, numel3, first, BLOCK)
    if x4_ptr is not None:
        first = cast_block(x4_ptr, y4_ptr, numel4, first, BLOCK)
    if x5_ptr is not None:
        first = cast_block(x5_ptr, y5_ptr, numel5, first, BLOCK)
