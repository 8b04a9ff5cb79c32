"""The short convolution with its SiLU and the length of a head's columns, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import as_operand

# Beside the square of a row's length.
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def convolved(
    x_ptr,
    weight_ptr,
    bias_ptr,
    place_ptr,
    row,
    token,
    tokens,
    channels,
    col,
    used,
    TAPS: tl.constexpr,
):
    """conv(x) of some tokens of a row of the batch and some channels, in fp32. Tokens that are not
    there give what nobody uses.
    """
    there = (token >= 0) & (token < tokens)
    place = token
    if place_ptr is not None:
        place = tl.load(place_ptr + token, mask=there, other=0)
    total = tl.zeros([token.shape[0], col.shape[0]], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + col, mask=used, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        before = TAPS - 1 - tap
        seen = (there & (place >= before))[:, None] & used[None, :]
        at = x_ptr + (row * tokens + token - before)[:, None] * channels + col[None, :]
        x = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + col * TAPS + tap, mask=used, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=("tokens",))
def _convolution_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    place_ptr,
    y_ptr,
    tokens,
    channels,
    width,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes BLOCK_T tokens of ``width`` channels, with UNIT a head's."""
    blocks = tl.cdiv(tokens, BLOCK_T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    token = tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1) * width + tl.arange(0, BLOCK_D)
    used = (tl.arange(0, BLOCK_D) < width) & (col < channels)
    z = convolved(
        x_ptr, weight_ptr, bias_ptr, place_ptr, row, token, tokens, channels, col, used, TAPS
    )
    y = z * tl.sigmoid(z)
    if UNIT:
        y = tl.where(used[None, :], y, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
    at = y_ptr + (row * tokens + token)[:, None] * channels + col[None, :]
    y = as_operand(y, y_ptr.dtype.element_ty, UPCAST)
    tl.store(at, y, mask=(token < tokens)[:, None] & used[None, :])


@triton.jit(do_not_specialize=("tokens",))
def _convolution_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    place_ptr,
    dx_ptr,
    shares_ptr,
    tokens,
    channels,
    width,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes dx of BLOCK_T tokens of ``width`` channels, and their share of the
    gradients of the taps and of the bias, ``shares`` [programs of tokens, TAPS + 1, channels].

    A token's x is in its own output and in those of the TAPS - 1 tokens behind it, whose slopes are
    computed again.
    """
    blocks = tl.cdiv(tokens, BLOCK_T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    token = tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1) * width + tl.arange(0, BLOCK_D)
    used = (tl.arange(0, BLOCK_D) < width) & (col < channels)
    share = shares_ptr + tl.program_id(0).to(tl.int64) * ((TAPS + 1) * channels) + col
    dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for behind in tl.static_range(TAPS):
        reader = token + behind
        there = reader < tokens
        z = convolved(
            x_ptr, weight_ptr, bias_ptr, place_ptr, row, reader, tokens, channels, col, used, TAPS
        )
        at = dy_ptr + (row * tokens + reader)[:, None] * channels + col[None, :]
        dz = tl.load(at, mask=there[:, None] & used[None, :], other=0.0).to(tl.float32)
        s = tl.sigmoid(z)
        if UNIT:
            y = tl.where(used[None, :], z * s, 0.0)
            inverse = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
            dz = inverse * (dz - y * inverse * inverse * tl.sum(dz * y, 1)[:, None])
        dz *= s * (1.0 + z * (1.0 - s))
        place = reader
        if place_ptr is not None:
            place = tl.load(place_ptr + reader, mask=there, other=0)
        dz = tl.where((there & (place >= behind))[:, None], dz, 0.0)
        tap = TAPS - 1 - behind
        weight = tl.load(weight_ptr + col * TAPS + tap, mask=used, other=0.0).to(tl.float32)
        dx += dz * weight[None, :]
        # The tap that these readers have for the program's own tokens.
        at = x_ptr + (row * tokens + token)[:, None] * channels + col[None, :]
        x = tl.load(at, mask=(token < tokens)[:, None] & used[None, :], other=0.0).to(tl.float32)
        tl.store(share + tap * channels, tl.sum(dz * x, 0), mask=used)
        if behind == 0:
            tl.store(share + TAPS * channels, tl.sum(dz, 0), mask=used)
    at = dx_ptr + (row * tokens + token)[:, None] * channels + col[None, :]
    dx = as_operand(dx, dx_ptr.dtype.element_ty, UPCAST)
    tl.store(at, dx, mask=(token < tokens)[:, None] & used[None, :])
