"""Triton kernels of the gated norm, one program over BLOCK_R rows of D columns. With
rstd = 1 / sqrt(mean(o^2) + eps), n = o rstd, s = sigmoid(gate):

    y = n weight gate s
    dgate = dy n weight s (1 + gate (1 - s))
    dweight = sum over rows of e n,  e = dy gate s
    do = rstd (e weight - n mean(e weight n))
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand


@triton.jit
def load_rows(x_ptr, at, inside):
    return tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("rows",))
def gated_norm_kernel(
    o_ptr,
    weight_ptr,
    gate_ptr,
    y_ptr,
    eps,
    rows,
    UPCAST: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes BLOCK_R rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (col < D)[None, :]
    at = row[:, None] * D + col[None, :]
    o = load_rows(o_ptr, at, inside)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None]
    y *= tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        gate = load_rows(gate_ptr, at, inside)
        y *= gate * tl.sigmoid(gate)
    tl.store(y_ptr + at, as_operand(y, y_ptr.dtype.element_ty, UPCAST), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def gated_norm_backward_kernel(
    dy_ptr,
    o_ptr,
    weight_ptr,
    gate_ptr,
    do_ptr,
    dgate_ptr,
    partial_sums_ptr,
    eps,
    rows,
    UPCAST: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes the gradients of BLOCK_R rows and its partial sum of the weight's."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (col < D)[None, :]
    at = row[:, None] * D + col[None, :]
    o = load_rows(o_ptr, at, inside)
    dy = load_rows(dy_ptr, at, inside)
    weight = tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    rstd = tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None]
    normed = o * rstd
    if gate_ptr is not None:
        gate = load_rows(gate_ptr, at, inside)
        s = tl.sigmoid(gate)
        dgate = dy * normed * weight * s * (1.0 + gate * (1.0 - s))
        dgate = as_operand(dgate, dgate_ptr.dtype.element_ty, UPCAST)
        tl.store(dgate_ptr + at, dgate, mask=inside)
        dy *= gate * s
    partial_sum = partial_sums_ptr + tl.program_id(0).to(tl.int64) * D + col
    tl.store(partial_sum, tl.sum(dy * normed, 0), mask=col < D)
    dy *= weight
    do = rstd * (dy - normed * (tl.sum(dy * normed, 1) / D)[:, None])
    tl.store(do_ptr + at, as_operand(do, do_ptr.dtype.element_ty, UPCAST), mask=inside)
