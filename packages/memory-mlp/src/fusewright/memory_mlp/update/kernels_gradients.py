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
def finish(
    x,
    out_ptr,
    at,
    inside,
    norm_ptr,
    squares_ptr,
    problem,
    slot,
    slots,
    ADD: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """Write part of a gradient: with ``ADD`` added to what is there, or nothing where the step was
    skipped; with ``SQUARES`` the sum of its squares too.
    """
    if ADD:
        x = tl.where(is_finite(tl.load(norm_ptr + problem)), x, 0.0)
        x += tl.load(out_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, x, mask=inside)
    if SQUARES:
        x = tl.where(inside, x, 0.0)
        tl.store(squares_ptr + problem.to(tl.int64) * slots + slot, tl.sum(tl.ravel(x * x), 0))


@triton.jit
def finish_bias(
    sums_ptr,
    out_ptr,
    norm_ptr,
    squares_ptr,
    factor,
    problem,
    first,
    size,
    row_tiles,
    slot,
    slots,
    ADD: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the gradient of a bias, from the column sums of the tiles of rows."""
    col = (first + tl.arange(0, BLOCK)).to(tl.int32)
    x = factor * sum_of_tiles(sums_ptr, problem, row_tiles, col, size, BLOCK)
    at = problem.to(tl.int64) * size + col
    finish(x, out_ptr, at, col < size, norm_ptr, squares_ptr, problem, slot, slots, ADD, SQUARES)


@triton.jit
def at_columns(
    x_ptr,
    tile,
    cols,
    stride,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The first rows of the columns of a tile of x, and which columns these are."""
    col = tile * BLOCK + tl.arange(0, BLOCK)
    if TRANSPOSED:
        at = row_major(x_ptr, tile, cols, tl.cast(stride, tl.int64), BLOCK, BLOCK_K)
    else:
        at = column_major(x_ptr, col, stride, BLOCK_K)
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
    THIRD: tl.constexpr,
    ADD: tl.constexpr,
    SQUARES: tl.constexpr,
    SPLIT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes a tile of w1 or of w2, from ``split_rows`` rows, or a block of a bias.

    With ``SPLIT`` w1 and w2 are partial sums [splits, problems, ...], and the biases come later.
    ``TRANSPOSED``: the operands are transposes, and ``k_row_stride`` is that of k's.
    """
    after_the_launch_before(OVERLAPS)
    problem = tl.program_id(0) // programs
    slot = tl.program_id(0) % programs
    tiles1 = tl.cdiv(hidden, BLOCK_M) * tl.cdiv(width, BLOCK_N)
    tiles2 = tl.cdiv(width, BLOCK_M) * tl.cdiv(hidden, BLOCK_N)
    split = slot // (tiles1 + tiles2)
    tile = slot % (tiles1 + tiles2)
    first = split * split_rows
    padded = rows
    if TRANSPOSED:
        padded = padded_rows(rows)
    last = tl.minimum(first + split_rows, padded)
    start = problem.to(tl.int64) * padded
    # The place of a tile: that of the problem, or of its partial sums.
    place = problem.to(tl.int64)
    if SPLIT:
        place += split.to(tl.int64) * problems
    place = place * hidden * width
    if split < splits:
        of_w1 = tile < tiles1
        tile = tl.where(of_w1, tile, tile - tiles1)
        a_cols = tl.where(of_w1, hidden, width)
        b_cols = tl.where(of_w1, width, hidden)
        k_ptr += start_of_problem(problem, k_inner, k_outer_stride, k_inner_stride)
        a_ptr = tl.where(of_w1, a1_ptr + start * hidden, a2_ptr + start * width)
        b_ptr = tl.where(of_w1, k_ptr, b2_ptr + start * hidden)
        if TRANSPOSED:
            a_stride = padded
            b_stride = padded
        else:
            a_stride = a_cols
            b_stride = tl.where(of_w1, k_row_stride, hidden)
        a_tile = tile // tl.cdiv(b_cols, BLOCK_N)
        b_tile = tile % tl.cdiv(b_cols, BLOCK_N)
        a_at, a_col = at_columns(a_ptr, a_tile, a_cols, a_stride, TRANSPOSED, BLOCK_M, BLOCK_K)
        b_at, b_col = at_columns(b_ptr, b_tile, b_cols, b_stride, TRANSPOSED, BLOCK_N, BLOCK_K)
        steps = tl.cdiv(tl.maximum(last - first, 0), BLOCK_K)
        passes = 1
        if THIRD:
            passes = tl.where(of_w1, 1, 2)
            a3_at, _ = at_columns(
                a3_ptr + start * width, a_tile, a_cols, a_stride, TRANSPOSED, BLOCK_M, BLOCK_K
            )
            b3_at, _ = at_columns(
                b3_ptr + start * hidden, b_tile, b_cols, b_stride, TRANSPOSED, BLOCK_N, BLOCK_K
            )
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        # One loop for all products, so that they use the same shared memory.
        for step in tl.range(0, passes * steps, num_stages=NUM_STAGES):
            if THIRD:
                again = step >= steps
                start_row = first + tl.where(again, step - steps, step) * BLOCK_K
                left_at = tl.where(again, a3_at, a_at)
                right_at = tl.where(again, b3_at, b_at)
            else:
                start_row = first + step * BLOCK_K
                left_at = a_at
                right_at = b_at
            if TRANSPOSED:
                a = load_left(left_at, start_row, last, EVEN, BLOCK_K)
            else:
                a = load_right(
                    left_at, start_row, last, a_col, a_cols, a_stride, False, EVEN, BLOCK_K
                )
                a = tl.trans(a)
            b = load_right(
                right_at, start_row, last, b_col, b_cols, b_stride, TRANSPOSED, EVEN, BLOCK_K
            )
            acc = add_product(acc, a, b, UPCAST, PRECISION)
        corner = (a_tile * BLOCK_M).to(tl.int64) * b_cols
        row = a_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        finish(
            factor * acc,
            tl.where(of_w1, w1_ptr, w2_ptr) + (place + corner),
            tl.arange(0, BLOCK_M)[:, None] * b_cols + b_col[None, :],
            (row < a_cols)[:, None] & (b_col < b_cols)[None, :],
            norm_ptr,
            squares_ptr,
            problem,
            slot,
            programs,
            ADD,
            SQUARES,
        )
    elif not SPLIT:
        if tile < tl.cdiv(hidden, BLOCK_N):
            finish_bias(
                sums1_ptr,
                bias1_ptr,
                norm_ptr,
                squares_ptr,
                factor,
                problem,
                tile * BLOCK_N,
                hidden,
                row_tiles1,
                slot,
                programs,
                ADD,
                SQUARES,
                BLOCK_N,
            )
        else:
            tile -= tl.cdiv(hidden, BLOCK_N)
            finish_bias(
                sums2_ptr,
                bias2_ptr,
                norm_ptr,
                squares_ptr,
                factor,
                problem,
                tile * BLOCK_N,
                width,
                row_tiles2,
                slot,
                programs,
                ADD,
                SQUARES,
                BLOCK_N,
            )


@triton.jit
def add_splits(
    parts_ptr,
    out_ptr,
    norm_ptr,
    squares_ptr,
    problem,
    problems,
    first,
    size,
    splits,
    slot,
    slots,
    ADD: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of w1 or w2, from their partial sums."""
    at = first + tl.arange(0, BLOCK)
    inside = at < size
    at += problem.to(tl.int64) * size
    x = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.range(0, splits):
        offset = tl.cast(split, tl.int64) * problems * size
        x += tl.load(parts_ptr + offset + at, mask=inside, other=0.0)
    finish(x, out_ptr, at, inside, norm_ptr, squares_ptr, problem, slot, slots, ADD, SQUARES)


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
    ADD: tl.constexpr,
    SQUARES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program adds the partial sums of BLOCK elements of w1 or w2, or computes a block of a
    bias.
    """
    after_the_launch_before(OVERLAPS)
    problem = tl.program_id(0) // programs
    slot = tl.program_id(0) % programs
    part, first = part_of_program(slot, width, hidden, BLOCK)
    matrix = tl.cast(hidden, tl.int64) * width
    if part == 0:
        add_splits(
            parts1_ptr,
            w1_ptr,
            norm_ptr,
            squares_ptr,
            problem,
            problems,
            first,
            matrix,
            splits,
            slot,
            programs,
            ADD,
            SQUARES,
            BLOCK,
        )
    elif part == 1:
        add_splits(
            parts2_ptr,
            w2_ptr,
            norm_ptr,
            squares_ptr,
            problem,
            problems,
            first,
            matrix,
            splits,
            slot,
            programs,
            ADD,
            SQUARES,
            BLOCK,
        )
    elif part == 2:
        finish_bias(
            sums1_ptr,
            bias1_ptr,
            norm_ptr,
            squares_ptr,
            factor,
            problem,
            first,
            hidden,
            row_tiles1,
            slot,
            programs,
            ADD,
            SQUARES,
            BLOCK,
        )
    else:
        finish_bias(
            sums2_ptr,
            bias2_ptr,
            norm_ptr,
            squares_ptr,
            factor,
            problem,
            first,
            width,
            row_tiles2,
            slot,
            programs,
            ADD,
            SQUARES,
            BLOCK,
        )
