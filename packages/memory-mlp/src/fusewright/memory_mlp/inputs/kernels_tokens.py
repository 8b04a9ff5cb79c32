"""Triton kernels that leave tokens out: which are finite, what takes the place of the others, how
many they are, and the logits of the gates, forward and backward.

The logits are sums over a token's row in fp32, one after the other: there are too few of them for a
matrix unit, which would also round its operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import zeros

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def tokens_of_program(program, rows, CONFIG: tl.constexpr):
    """The ROWS tokens of a program, in all rows of a batch: their places, the columns, which tokens
    there are, and which of their numbers.
    """
    row = program.to(tl.int64) * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)
    col = tl.arange(0, CONFIG.BLOCK_WIDTH)
    there = row < rows
    return row, col, there, there[:, None] & (col < CONFIG.WIDTH)[None, :]


@triton.jit
def finite_and_unmasked(x, mask_ptr, row, there):
    """Which tokens are finite, as are their sums, and not masked."""
    present = tl.abs(tl.sum(x.to(tl.float32), 1)) < INFINITY
    if mask_ptr is not None:
        present = present & (tl.load(mask_ptr + row, mask=there, other=0) != 0)
    return present


@triton.jit(do_not_specialize=("tokens", "rows"))
def finite_tokens_kernel(
    x_ptr,
    mask_ptr,
    y_ptr,
    present_ptr,
    tokens,
    rows,
    batch_stride,
    row_stride,
    CONFIG: tl.constexpr,
):
    """One program takes ROWS tokens of all rows: x where it is finite and not masked, else 0."""
    row, col, there, inside = tokens_of_program(tl.program_id(0), rows, CONFIG)
    at = row // tokens * batch_stride + row % tokens * row_stride
    x = tl.load(x_ptr + at[:, None] + col[None, :], mask=inside, other=0.0)
    present = finite_and_unmasked(x, mask_ptr, row, there)
    y = tl.where(present[:, None], x, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * CONFIG.WIDTH + col[None, :], y, mask=inside)
    tl.store(present_ptr + row, present, mask=there)


@triton.jit(do_not_specialize=("tokens", "rows"))
def kept_tokens_kernel(
    x_ptr,
    kept_ptr,
    mask_ptr,
    y_ptr,
    other,
    tokens,
    rows,
    batch_stride,
    row_stride,
    CONFIG: tl.constexpr,
):
    """One program takes ROWS tokens of all rows: x where all FLAGS of the token are set and
    ``other`` where they are not; 0 where it is masked.
    """
    FLAGS: tl.constexpr = CONFIG.FLAGS
    row = tl.program_id(0).to(tl.int64) * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)
    col = tl.arange(0, CONFIG.BLOCK_WIDTH)
    flag = tl.arange(0, CONFIG.BLOCK_FLAGS)
    there = row < rows
    inside = there[:, None] & (col < CONFIG.WIDTH)[None, :]
    flags = tl.load(
        kept_ptr + row[:, None] * FLAGS + flag[None, :],
        mask=there[:, None] & (flag < FLAGS)[None, :],
        other=1,
    )
    kept = tl.min((flags != 0).to(tl.int32), 1) != 0
    at = row // tokens * batch_stride + row % tokens * row_stride
    # Tokens that are left out may be NaN and are not loaded.
    x = tl.load(x_ptr + at[:, None] + col[None, :], mask=inside & kept[:, None], other=0.0)
    y = tl.where(kept[:, None], x.to(tl.float32), other)
    if mask_ptr is not None:
        unmasked = tl.load(mask_ptr + row, mask=there, other=0) != 0
        y = tl.where(unmasked[:, None], y, 0.0)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * CONFIG.WIDTH + col[None, :], y, mask=inside)


@triton.jit(do_not_specialize=("tokens", "heads"))
def count_tokens_kernel(
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
    CONFIG: tl.constexpr,
):
    """One program counts the tokens of one row that one head did not write, in all those that are
    not masked, and advances both counters of the state.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    missing = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        there = token < tokens
        place = batch * tokens + token
        written = tl.load(written_ptr + place * heads + head, mask=there, other=0) != 0
        expected = there
        if mask_ptr is not None:
            expected = tl.load(mask_ptr + place, mask=there, other=0) != 0
        missing += expected.to(tl.int32) - written.to(tl.int32)
    at = batch * heads + head
    now = tl.sum(missing, 0).to(tl.int64)
    if lost_ptr is not None:
        now += tl.load(lost_ptr + at)
    tl.store(now_ptr + at, now)
    tl.store(total_ptr + at, tl.load(skipped_ptr + at) + now)
    if head == 0:
        tl.store(later_ptr + batch, tl.load(position_ptr + batch) + tokens)


@triton.jit
def weight_rows(weight_ptr, first, col, CONFIG: tl.constexpr):
    """AT_ONCE rows of the gates' weights from ``first`` on, in fp32, zeros beyond the last."""
    AT_ONCE: tl.constexpr = CONFIG.AT_ONCE
    WIDTH: tl.constexpr = CONFIG.WIDTH
    rows = tl.tuple(())
    for step in tl.static_range(AT_ONCE):
        row = tl.load(
            weight_ptr + (first + step) * WIDTH + col,
            mask=(col < WIDTH) & (first + step < CONFIG.LOGITS),
            other=0.0,
        )
        rows += (row.to(tl.float32),)
    return rows


@triton.jit(do_not_specialize=("tokens", "rows"))
def gated_tokens_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mask_ptr,
    y_ptr,
    present_ptr,
    logits_ptr,
    tokens,
    rows,
    batch_stride,
    row_stride,
    CONFIG: tl.constexpr,
):
    """One program takes ROWS tokens of all rows: x where it is finite and not masked, else 0, and
    the LOGITS logits of each token.
    """
    LOGITS: tl.constexpr = CONFIG.LOGITS
    AT_ONCE: tl.constexpr = CONFIG.AT_ONCE
    row, col, there, inside = tokens_of_program(tl.program_id(0), rows, CONFIG)
    at = row // tokens * batch_stride + row % tokens * row_stride
    x = tl.load(x_ptr + at[:, None] + col[None, :], mask=inside, other=0.0)
    weights = weight_rows(weight_ptr, 0, col, CONFIG)
    y = x.to(tl.float32)
    present = finite_and_unmasked(y, mask_ptr, row, there)
    y = tl.where(present[:, None], y, 0.0)
    y_at = y_ptr + row[:, None] * CONFIG.WIDTH + col[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(present_ptr + row, present, mask=there)
    for first in range(0, LOGITS, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            number = first + step
            bias = tl.load(bias_ptr + number, mask=number < LOGITS, other=0.0).to(tl.float32)
            logit = tl.sum(y * weights[step][None, :], 1) + bias
            tl.store(logits_ptr + row * LOGITS + number, logit, mask=there & (number < LOGITS))
        weights = weight_rows(weight_ptr, first + AT_ONCE, col, CONFIG)


@triton.jit
def tokens_gradient(
    present_ptr, weight_ptr, dy_ptr, dlogits_ptr, dx_ptr, tile, rows, CONFIG: tl.constexpr
):
    """Write the gradient of ROWS tokens, from those of the kept tokens and of the logits."""
    LOGITS: tl.constexpr = CONFIG.LOGITS
    AT_ONCE: tl.constexpr = CONFIG.AT_ONCE
    row, col, there, inside = tokens_of_program(tile, rows, CONFIG)
    to = row[:, None] * CONFIG.WIDTH + col[None, :]
    present = tl.load(present_ptr + row, mask=there, other=0) != 0
    dx = zeros(CONFIG.ROWS, CONFIG.BLOCK_WIDTH)
    if dy_ptr is not None:
        dx += tl.load(dy_ptr + to, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, LOGITS, AT_ONCE):
        weights = weight_rows(weight_ptr, first, col, CONFIG)
        for step in tl.static_range(AT_ONCE):
            number = first + step
            slope = tl.load(
                dlogits_ptr + row * LOGITS + number, mask=there & (number < LOGITS), other=0.0
            )
            dx += slope[:, None] * weights[step][None, :]
    dx = tl.where(present[:, None], dx, 0.0)
    tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weights_part(y_ptr, dlogits_ptr, parts_ptr, part, tile, rows, CONFIG: tl.constexpr):
    """Write the partial sums, over TOKENS tokens, of the gradients of COLS columns of the weights
    and, with the first columns, of the biases.
    """
    LOGITS: tl.constexpr = CONFIG.LOGITS
    BLOCK_LOGITS: tl.constexpr = CONFIG.BLOCK_LOGITS
    WIDTH: tl.constexpr = CONFIG.WIDTH
    COLS: tl.constexpr = CONFIG.COLS
    TOKENS: tl.constexpr = CONFIG.TOKENS
    row = part.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    col = tile * COLS + tl.arange(0, COLS)
    there, within = row < rows, col < WIDTH
    y = tl.load(
        y_ptr + row[:, None] * WIDTH + col[None, :],
        mask=there[:, None] & within[None, :],
        other=0.0,
    ).to(tl.float32)
    parts_ptr += part.to(tl.int64) * (LOGITS * WIDTH + LOGITS)
    for first in range(0, LOGITS, BLOCK_LOGITS):
        number = first + tl.arange(0, BLOCK_LOGITS)
        is_logit = number < LOGITS
        slopes = tl.load(
            dlogits_ptr + row[None, :] * LOGITS + number[:, None],
            mask=is_logit[:, None] & there[None, :],
            other=0.0,
        )
        tl.store(
            parts_ptr + number[:, None] * WIDTH + col[None, :],
            tl.dot(slopes, y, input_precision="ieee"),
            mask=is_logit[:, None] & within[None, :],
        )
        if tile == 0:
            tl.store(parts_ptr + LOGITS * WIDTH + number, tl.sum(slopes, 1), mask=is_logit)


@triton.jit(do_not_specialize=("rows", "row_tiles"))
def gated_tokens_backward_kernel(
    y_ptr,
    present_ptr,
    weight_ptr,
    dy_ptr,
    dlogits_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    row_tiles,
    CONFIG: tl.constexpr,
):
    """The first ``row_tiles`` programs compute the gradient of ROWS tokens each, the others the
    partial sums, over TOKENS tokens, of the weights' and biases' gradients. ``parts`` is [partial
    sums, LOGITS * WIDTH + LOGITS].
    """
    WIDE: tl.constexpr = (CONFIG.WIDTH + CONFIG.COLS - 1) // CONFIG.COLS
    program = tl.program_id(0)
    if program < row_tiles:
        tokens_gradient(present_ptr, weight_ptr, dy_ptr, dlogits_ptr, dx_ptr, program, rows, CONFIG)
    else:
        program -= row_tiles
        weights_part(y_ptr, dlogits_ptr, parts_ptr, program // WIDE, program % WIDE, rows, CONFIG)
