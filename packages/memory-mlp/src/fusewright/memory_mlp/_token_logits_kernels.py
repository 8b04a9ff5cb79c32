"""Triton kernels that leave tokens out and compute their gates' logits, and the way back.

The logits are sums over a token's row in fp32, one after the other: there are too few of them for a
matrix unit, which would also round what it multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def weight_rows(
    weight_ptr,
    first,
    col,
    LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE rows of the gates' weights from ``first`` on, in fp32, zeros beyond the last."""
    rows = tl.tuple(())
    for step in tl.static_range(AT_ONCE):
        row = tl.load(
            weight_ptr + (first + step) * WIDTH + col,
            mask=(col < WIDTH) & (first + step < LOGITS),
            other=0.0,
        )
        rows += (row.to(tl.float32),)
    return rows


@triton.jit(do_not_specialize=("tokens", "rows"))
def _gated_tokens_kernel(
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
    HAS_MASK: tl.constexpr,
    LOGITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program takes ROWS tokens of all rows: x where it is finite and not masked, else 0, and
    the LOGITS numbers of each of them.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_WIDTH)
    there = row < rows
    inside = there[:, None] & (col < WIDTH)[None, :]
    at = row // tokens * batch_stride + row % tokens * row_stride
    x = tl.load(x_ptr + at[:, None] + col[None, :], mask=inside, other=0.0)
    weights = weight_rows(weight_ptr, 0, col, LOGITS, WIDTH, AT_ONCE)
    y = x.to(tl.float32)
    present = tl.abs(tl.sum(y, 1)) < INFINITY
    if HAS_MASK:
        present = present & (tl.load(mask_ptr + row, mask=there, other=0) != 0)
    y = tl.where(present[:, None], y, 0.0)
    tl.store(y_ptr + row[:, None] * WIDTH + col[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(present_ptr + row, present, mask=there)
    for first in range(0, LOGITS, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            number = first + step
            bias = tl.load(bias_ptr + number, mask=number < LOGITS, other=0.0).to(tl.float32)
            logit = tl.sum(y * weights[step][None, :], 1) + bias
            tl.store(logits_ptr + row * LOGITS + number, logit, mask=there & (number < LOGITS))
        weights = weight_rows(weight_ptr, first + AT_ONCE, col, LOGITS, WIDTH, AT_ONCE)


@triton.jit
def tokens_gradient(
    present_ptr,
    weight_ptr,
    dy_ptr,
    dlogits_ptr,
    dx_ptr,
    tile,
    rows,
    HAS_DY: tl.constexpr,
    LOGITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the gradient of ROWS tokens: that of what they became and of their logits."""
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_WIDTH)
    there = row < rows
    inside = there[:, None] & (col < WIDTH)[None, :]
    to = row[:, None] * WIDTH + col[None, :]
    present = tl.load(present_ptr + row, mask=there, other=0) != 0
    dx = tl.zeros([ROWS, BLOCK_WIDTH], tl.float32)
    if HAS_DY:
        dx += tl.load(dy_ptr + to, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, LOGITS, AT_ONCE):
        weights = weight_rows(weight_ptr, first, col, LOGITS, WIDTH, AT_ONCE)
        for step in tl.static_range(AT_ONCE):
            number = first + step
            slope = tl.load(
                dlogits_ptr + row * LOGITS + number, mask=there & (number < LOGITS), other=0.0
            )
            dx += slope[:, None] * weights[step][None, :]
    dx = tl.where(present[:, None], dx, 0.0)
    tl.store(dx_ptr + to, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weights_share(
    y_ptr,
    dlogits_ptr,
    parts_ptr,
    share,
    tile,
    rows,
    LOGITS: tl.constexpr,
    BLOCK_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Write what SHARE tokens add to the gradients of COLS columns of the weights and, with the
    first ones, of the biases.
    """
    row = share.to(tl.int64) * SHARE + tl.arange(0, SHARE)
    col = tile * COLS + tl.arange(0, COLS)
    there, within = row < rows, col < WIDTH
    y = tl.load(
        y_ptr + row[:, None] * WIDTH + col[None, :],
        mask=there[:, None] & within[None, :],
        other=0.0,
    ).to(tl.float32)
    parts_ptr += share.to(tl.int64) * (LOGITS * WIDTH + LOGITS)
    for first in range(0, LOGITS, BLOCK_LOGITS):
        number = first + tl.arange(0, BLOCK_LOGITS)
        asked = number < LOGITS
        slopes = tl.load(
            dlogits_ptr + row[None, :] * LOGITS + number[:, None],
            mask=asked[:, None] & there[None, :],
            other=0.0,
        )
        tl.store(
            parts_ptr + number[:, None] * WIDTH + col[None, :],
            tl.dot(slopes, y, input_precision="ieee"),
            mask=asked[:, None] & within[None, :],
        )
        if tile == 0:
            tl.store(parts_ptr + LOGITS * WIDTH + number, tl.sum(slopes, 1), mask=asked)


@triton.jit(do_not_specialize=("rows", "row_tiles"))
def _gated_tokens_backward_kernel(
    y_ptr,
    present_ptr,
    weight_ptr,
    dy_ptr,
    dlogits_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    row_tiles,
    HAS_DY: tl.constexpr,
    LOGITS: tl.constexpr,
    BLOCK_LOGITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """The first ``row_tiles`` programs compute the gradient of ROWS tokens each, the others the
    share that SHARE tokens have in the weights' and biases' gradients. ``parts`` is [shares,
    LOGITS * WIDTH + LOGITS].
    """
    WIDE: tl.constexpr = (WIDTH + COLS - 1) // COLS
    program = tl.program_id(0)
    if program < row_tiles:
        tokens_gradient(
            present_ptr,
            weight_ptr,
            dy_ptr,
            dlogits_ptr,
            dx_ptr,
            program,
            rows,
            HAS_DY,
            LOGITS,
            AT_ONCE,
            WIDTH,
            BLOCK_WIDTH,
            ROWS,
        )
    else:
        weights_share(
            y_ptr,
            dlogits_ptr,
            parts_ptr,
            (program - row_tiles) // WIDE,
            (program - row_tiles) % WIDE,
            rows,
            LOGITS,
            BLOCK_LOGITS,
            WIDTH,
            COLS,
            SHARE,
        )
