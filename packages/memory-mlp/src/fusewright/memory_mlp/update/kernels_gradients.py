"""Triton kernels of the sums over rows, which are the gradients of weights and biases:

    w1 = c a1^T k              b1 = c sum a1
    w2 = c (a2^T b2 + a3^T b3) b2 = c sum of the last left operand

Forward a1 is p, a2 is e, b2 is h and there is no third product; backward a1 is z_bar, a2 is e, b2
is dh_bar, a3 is q and b3 is h, and all is added to what the outputs hold.

One program adds over all rows of a tile of w1 or w2, or, where tiles are few, over a part of
them: then a second kernel adds the partial sums. No atomics: every sum has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import add_product
from .tiles import (
    after_the_launch_before,
    column_major,
    is_finite,
    load_left,
    load_right,
    padded_rows,
    part_of_program,
    row_major,
    start_of_problem,
    sum_of_tiles,
)


@triton.jit
def finish(x, out_ptr, at, inside, norm_ptr, squares_ptr, problem, slot, slots):
    """Write part of a gradient: with a norm onto what lies there, or nothing where the step was
    skipped; with ``squares_ptr`` the sum of its squares too.
    """
    if norm_ptr is not None:
        x = tl.where(is_finite(tl.load(norm_ptr + problem)), x, 0.0)
        x += tl.load(out_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, x, mask=inside)
    if squares_ptr is not None:
        x = tl.where(inside, x, 0.0)
        tl.store(squares_ptr + problem.to(tl.int64) * slots + slot, tl.sum(tl.ravel(x * x), 0))


@triton.jit
def finish_bias(
    sums_ptr, row_tiles, out_ptr, norm_ptr, squares_ptr, factor, place, first, size, BLOCK
):
    """A block of the gradient of a bias, from the column sums of the tiles of rows."""
    problem, slot, slots = place
    col = (first + tl.arange(0, BLOCK)).to(tl.int32)
    x = factor * sum_of_tiles(sums_ptr, problem, row_tiles, col, size, BLOCK)
    at = problem.to(tl.int64) * size + col
    finish(x, out_ptr, at, col < size, norm_ptr, squares_ptr, problem, slot, slots)


@triton.jit
def at_columns(x_ptr, tile, cols, stride, BLOCK: tl.constexpr, CONFIG: tl.constexpr):
    """The first rows of the columns of a tile of x, and which columns these are."""
    col = tile * BLOCK + tl.arange(0, BLOCK)
    if CONFIG.TRANSPOSED:
        at = row_major(x_ptr, tile, cols, tl.cast(stride, tl.int64), BLOCK, CONFIG.BLOCK_K)
    else:
        at = column_major(x_ptr, col, stride, CONFIG.BLOCK_K)
    return at, col


@triton.jit
def gradients_kernel(
    a1_ptr,
    k_ptr,
    a2_ptr,
    b2_ptr,
    a3_ptr,
    b3_ptr,
    sums1_ptr,
    sums2_ptr,
    norm_ptr,
    w1_ptr,
    bias1_ptr,
    w2_ptr,
    bias2_ptr,
    squares_ptr,
    factor,
    k_inner,
    k_outer_stride,
    k_inner_stride,
    k_row_stride,
    rows,
    width,
    hidden,
    problems,
    programs,
    splits,
    split_rows,
    row_tiles1,
    row_tiles2,
    CONFIG: tl.constexpr,
):
    """One program computes a tile of w1 or of w2, from ``split_rows`` rows, or a block of a bias.

    With ``SPLIT`` w1 and w2 are partial sums [splits, problems, ...], and the biases come later.
    ``TRANSPOSED``: the operands are transposes, and ``k_row_stride`` is that of k's.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    after_the_launch_before(CONFIG)
    problem = tl.program_id(0) // programs
    slot = tl.program_id(0) % programs
    tiles1 = tl.cdiv(hidden, BLOCK_M) * tl.cdiv(width, BLOCK_N)
    tiles2 = tl.cdiv(width, BLOCK_M) * tl.cdiv(hidden, BLOCK_N)
    split = slot // (tiles1 + tiles2)
    tile = slot % (tiles1 + tiles2)
    first = split * split_rows
    padded = rows
    if CONFIG.TRANSPOSED:
        padded = padded_rows(rows)
    last = tl.minimum(first + split_rows, padded)
    start = problem.to(tl.int64) * padded
    # Where a tile's matrix begins: that of the problem, or of its partial sums.
    corner = problem.to(tl.int64)
    if CONFIG.SPLIT:
        corner += split.to(tl.int64) * problems
    corner = corner * hidden * width
    if split < splits:
        of_w1 = tile < tiles1
        tile = tl.where(of_w1, tile, tile - tiles1)
        a_cols = tl.where(of_w1, hidden, width)
        b_cols = tl.where(of_w1, width, hidden)
        k_ptr += start_of_problem(problem, k_inner, k_outer_stride, k_inner_stride)
        a_ptr = tl.where(of_w1, a1_ptr + start * hidden, a2_ptr + start * width)
        b_ptr = tl.where(of_w1, k_ptr, b2_ptr + start * hidden)
        if CONFIG.TRANSPOSED:
            a_stride = padded
            b_stride = padded
        else:
            a_stride = a_cols
            b_stride = tl.where(of_w1, k_row_stride, hidden)
        a_tile = tile // tl.cdiv(b_cols, BLOCK_N)
        b_tile = tile % tl.cdiv(b_cols, BLOCK_N)
        a_at, a_col = at_columns(a_ptr, a_tile, a_cols, a_stride, BLOCK_M, CONFIG)
        b_at, b_col = at_columns(b_ptr, b_tile, b_cols, b_stride, BLOCK_N, CONFIG)
        steps = tl.cdiv(tl.maximum(last - first, 0), CONFIG.BLOCK_K)
        passes = 1
        if a3_ptr is not None:
            passes = tl.where(of_w1, 1, 2)
            a3_at, _ = at_columns(a3_ptr + start * width, a_tile, a_cols, a_stride, BLOCK_M, CONFIG)
            b3_ptr += start * hidden
            b3_at, _ = at_columns(b3_ptr, b_tile, b_cols, b_stride, BLOCK_N, CONFIG)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        # One loop for all products, so that they use the same shared memory.
        for step in tl.range(0, passes * steps, num_stages=CONFIG.NUM_STAGES):
            if a3_ptr is not None:
                again = step >= steps
                start_row = first + tl.where(again, step - steps, step) * CONFIG.BLOCK_K
                left_at = tl.where(again, a3_at, a_at)
                right_at = tl.where(again, b3_at, b_at)
            else:
                start_row = first + step * CONFIG.BLOCK_K
                left_at = a_at
                right_at = b_at
            if CONFIG.TRANSPOSED:
                a = load_left(left_at, start_row, last, CONFIG)
            else:
                a = load_right(left_at, start_row, last, a_col, a_cols, a_stride, False, CONFIG)
                a = tl.trans(a)
            b = load_right(
                right_at, start_row, last, b_col, b_cols, b_stride, CONFIG.TRANSPOSED, CONFIG
            )
            acc = add_product(acc, a, b, CONFIG)
        corner += (a_tile * BLOCK_M).to(tl.int64) * b_cols
        row = a_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        out_ptr = tl.where(of_w1, w1_ptr, w2_ptr) + corner
        at = tl.arange(0, BLOCK_M)[:, None] * b_cols + b_col[None, :]
        inside = (row < a_cols)[:, None] & (b_col < b_cols)[None, :]
        finish(factor * acc, out_ptr, at, inside, norm_ptr, squares_ptr, problem, slot, programs)
    elif not CONFIG.SPLIT:
        place = problem, slot, programs
        if tile < tl.cdiv(hidden, BLOCK_N):
            finish_bias(
                sums1_ptr, row_tiles1, bias1_ptr, norm_ptr, squares_ptr, factor,
                place, tile * BLOCK_N, hidden, BLOCK_N,
            )  # fmt: skip
        else:
            tile -= tl.cdiv(hidden, BLOCK_N)
            finish_bias(
                sums2_ptr, row_tiles2, bias2_ptr, norm_ptr, squares_ptr, factor,
                place, tile * BLOCK_N, width, BLOCK_N,
            )  # fmt: skip


@triton.jit
def add_splits(
    parts_ptr, out_ptr, norm_ptr, squares_ptr, place, problems, splits, first, size, BLOCK
):
    """BLOCK elements of w1 or w2, from their partial sums."""
    problem, slot, slots = place
    at = first + tl.arange(0, BLOCK)
    inside = at < size
    at += problem.to(tl.int64) * size
    x = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.range(0, splits):
        offset = tl.cast(split, tl.int64) * problems * size
        x += tl.load(parts_ptr + offset + at, mask=inside, other=0.0)
    finish(x, out_ptr, at, inside, norm_ptr, squares_ptr, problem, slot, slots)


@triton.jit
def add_splits_kernel(
    parts1_ptr,
    parts2_ptr,
    sums1_ptr,
    sums2_ptr,
    norm_ptr,
    w1_ptr,
    bias1_ptr,
    w2_ptr,
    bias2_ptr,
    squares_ptr,
    factor,
    width,
    hidden,
    problems,
    programs,
    splits,
    row_tiles1,
    row_tiles2,
    CONFIG: tl.constexpr,
):
    """One program adds the partial sums of BLOCK elements of w1 or w2, or computes a block of a
    bias.
    """
    after_the_launch_before(CONFIG)
    problem = tl.program_id(0) // programs
    slot = tl.program_id(0) % programs
    part, first = part_of_program(slot, width, hidden, CONFIG.BLOCK)
    place = problem, slot, programs
    matrix = tl.cast(hidden, tl.int64) * width
    if part == 0:
        add_splits(
            parts1_ptr, w1_ptr, norm_ptr, squares_ptr,
            place, problems, splits, first, matrix, CONFIG.BLOCK,
        )  # fmt: skip
    elif part == 1:
        add_splits(
            parts2_ptr, w2_ptr, norm_ptr, squares_ptr,
            place, problems, splits, first, matrix, CONFIG.BLOCK,
        )  # fmt: skip
    elif part == 2:
        finish_bias(
            sums1_ptr, row_tiles1, bias1_ptr, norm_ptr, squares_ptr, factor,
            place, first, hidden, CONFIG.BLOCK,
        )  # fmt: skip
    else:
        finish_bias(
            sums2_ptr, row_tiles2, bias2_ptr, norm_ptr, squares_ptr, factor,
            place, first, width, CONFIG.BLOCK,
        )  # fmt: skip
