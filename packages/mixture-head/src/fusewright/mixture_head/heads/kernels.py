"""Triton kernels of the narrow second layer of grouped heads: SiLU and three columns for each head.

    out_g = SiLU(u_g) C_g                 u [rows, G, S], C [G, S, 3], out [rows, G, 3]
    du    = dSiLU * s * (1 + u * (1 - s)),  dSiLU_g = dout_g C_g^T,  s = sigmoid(u)
    dC_g  = sum over rows of SiLU(u_g)^T dout_g

The hidden layer u is by far the largest tensor of the heads. The forward pass reads it once, the
backward pass reads it once more and writes its gradient; its activation is never stored. Both
passes are bound by instructions as much as by memory, so the sigmoid is two approximations of the
hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.backends import interpreted

if interpreted():

    @triton.jit
    def sigmoid(x):
        return tl.sigmoid(x)

else:

    @triton.jit
    def sigmoid(x):
        """The divisor is 1 or more, so the reciprocal of the hardware serves."""
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [1.0 + power],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def hidden_offsets(row, head, col, HEADS: tl.constexpr, STORED: tl.constexpr):
    """Offsets of the hidden units of a head in u, [rows, HEADS, STORED]."""
    return row.to(tl.int64)[:, None] * (HEADS * STORED) + (head * STORED + col)[None, :]


@triton.jit
def silu_heads_kernel(
    u_ptr,
    weight_ptr,
    out_ptr,
    rows,
    HEADS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program computes the three outputs of one head for BLOCK_ROWS rows. ``weight``: C
    transposed, [HEADS, 3, STORED] in fp32.
    """
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    head = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    second = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    third = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in tl.range(0, STORED, BLOCK_COLS, num_stages=NUM_STAGES):
        col = start + tl.arange(0, BLOCK_COLS)
        inside = (row < rows)[:, None] & (col < STORED)[None, :]
        u = tl.load(u_ptr + hidden_offsets(row, head, col, HEADS, STORED), mask=inside, other=0.0)
        u = u.to(tl.float32)
        hidden = u * sigmoid(u)
        weight = weight_ptr + head * (3 * STORED) + col
        within = col < STORED
        first += hidden * tl.load(weight, mask=within, other=0.0)[None, :]
        second += hidden * tl.load(weight + STORED, mask=within, other=0.0)[None, :]
        third += hidden * tl.load(weight + 2 * STORED, mask=within, other=0.0)[None, :]
    out = out_ptr + (row.to(tl.int64) * HEADS + head) * 3
    tl.store(out, tl.sum(first, 1), mask=row < rows)
    tl.store(out + 1, tl.sum(second, 1), mask=row < rows)
    tl.store(out + 2, tl.sum(third, 1), mask=row < rows)


@triton.jit
def added_rows(x, HELD_ROWS: tl.constexpr):
    """Every HELD_ROWS-th row of x added: rows of one thread, so no number moves."""
    GROUPS: tl.constexpr = x.shape[0] // HELD_ROWS
    return tl.sum(tl.reshape(x, [GROUPS, HELD_ROWS, x.shape[1]]), 0)


@triton.jit
def silu_heads_backward_kernel(
    dparams_ptr,
    u_ptr,
    weight_ptr,
    du_ptr,
    parts_ptr,
    rows,
    part_rows,
    HEADS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    HELD_ROWS: tl.constexpr,
):
    """One program computes du at part_rows rows and BLOCK_COLS hidden units of one head, and the
    partial sums of dweight over these rows. Programs of the same rows follow one another.
    """
    blocks: tl.constexpr = (STORED + BLOCK_COLS - 1) // BLOCK_COLS
    part, head = tl.program_id(0) // blocks // HEADS, tl.program_id(0) // blocks % HEADS
    col = tl.program_id(0) % blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    within = col < STORED
    weight = weight_ptr + (head * STORED + col) * 3
    first_weight = tl.load(weight, mask=within, other=0.0).to(tl.float32)[None, :]
    second_weight = tl.load(weight + 1, mask=within, other=0.0).to(tl.float32)[None, :]
    third_weight = tl.load(weight + 2, mask=within, other=0.0).to(tl.float32)[None, :]
    first = tl.zeros([HELD_ROWS, BLOCK_COLS], tl.float32)
    second = tl.zeros([HELD_ROWS, BLOCK_COLS], tl.float32)
    third = tl.zeros([HELD_ROWS, BLOCK_COLS], tl.float32)
    start = part * part_rows
    end = tl.minimum(start + part_rows, rows)
    for block in range(start, end, BLOCK_ROWS):
        row = block + tl.arange(0, BLOCK_ROWS)
        inside = (row < end)[:, None] & within[None, :]
        at = hidden_offsets(row, head, col, HEADS, STORED)
        u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dparams = dparams_ptr + (row.to(tl.int64) * HEADS + head) * 3
        first_dparam = tl.load(dparams, mask=row < end, other=0.0).to(tl.float32)[:, None]
        second_dparam = tl.load(dparams + 1, mask=row < end, other=0.0).to(tl.float32)[:, None]
        third_dparam = tl.load(dparams + 2, mask=row < end, other=0.0).to(tl.float32)[:, None]
        gate = sigmoid(u)
        hidden = u * gate
        dhidden = first_dparam * first_weight
        dhidden += second_dparam * second_weight
        dhidden += third_dparam * third_weight
        # gate (1 + u (1 - gate))
        du = dhidden * (gate + (hidden - hidden * gate))
        tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=inside)
        first += added_rows(hidden * first_dparam, HELD_ROWS)
        second += added_rows(hidden * second_dparam, HELD_ROWS)
        third += added_rows(hidden * third_dparam, HELD_ROWS)
    sums = parts_ptr + ((part * HEADS + head).to(tl.int64) * STORED + col) * 3
    tl.store(sums, tl.sum(first, 0), mask=within)
    tl.store(sums + 1, tl.sum(second, 0), mask=within)
    tl.store(sums + 2, tl.sum(third, 0), mask=within)


@triton.jit
def add_parts_kernel(parts_ptr, dweight_ptr, size, parts, BLOCK: tl.constexpr):
    """One program adds the partial sums of BLOCK weights, in the order of the rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        sums = parts_ptr + tl.cast(part, tl.int64) * size
        total += tl.load(sums + at, mask=at < size, other=0.0)
    tl.store(dweight_ptr + at, total.to(dweight_ptr.dtype.element_ty), mask=at < size)
