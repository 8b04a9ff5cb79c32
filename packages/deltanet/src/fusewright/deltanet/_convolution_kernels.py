"""The short convolution with its SiLU and the length of a head's columns, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl

from ._tiles import as_operand

# Beside the square of a row's length.
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def place_of(place_ptr, token, tokens):
    """A token's place in its sequence, of one that is there."""
    place = token
    if place_ptr is not None:
        place = tl.load(place_ptr + token, mask=token < tokens, other=0)
    return place


@triton.jit
def columns_of(ptr, start, token, tokens, channels, used):
    """The columns of some tokens in fp32, each in a row that begins at ``start``; zeros where there
    is no such token.
    """
    there = (token >= 0) & (token < tokens)
    at = ptr + start + token[:, None] * channels
    return tl.load(at, mask=there[:, None] & used[None, :], other=0.0).to(tl.float32)


@triton.jit
def appended(items, item):
    """A tuple and one more behind it; triton knows no star."""
    return items + (item,)  # noqa: RUF005


@triton.jit
def shifted(items, item, COUNT: tl.constexpr):
    """A tuple of COUNT moved on by one, with ``item`` in the first place."""
    return (item,) + items[0 : COUNT - 1]  # noqa: RUF005


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
    # A row, too, can have more than 2**31 numbers.
    token = (tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    place = place_of(place_ptr, token, tokens)
    col = tl.program_id(1) * width + tl.arange(0, BLOCK_D)
    used = (tl.arange(0, BLOCK_D) < width) & (col < channels)
    start = row * tokens * channels + col[None, :]
    z = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + col, mask=used, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        before = TAPS - 1 - tap
        x = columns_of(x_ptr, start, token - before, tokens, channels, used)
        x = tl.where((place >= before)[:, None], x, 0.0)
        z += x * tl.load(weight_ptr + col * TAPS + tap, mask=used, other=0.0).to(tl.float32)
    y = z * tl.sigmoid(z)
    if UNIT:
        y = tl.where(used[None, :], y, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
    y = as_operand(y, y_ptr.dtype.element_ty, UPCAST)
    at = y_ptr + start + token[:, None] * channels
    tl.store(at, y, mask=(token < tokens)[:, None] & used[None, :])


@triton.jit(do_not_specialize=("rows", "tokens", "strips"))
def _convolution_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    place_ptr,
    dx_ptr,
    shares_ptr,
    rows,
    tokens,
    strips,
    channels,
    width,
    LENGTH: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program computes dx of BLOCK_S strips of LENGTH tokens, of ``width`` channels, and their
    share of the gradients of the taps and of the bias, ``shares`` [programs of strips, TAPS + 1,
    channels].

    A token's x is in its own output and in those of the TAPS - 1 tokens behind it. So all strips
    are walked from the last token to the first, with the x before the token and the slopes behind
    it in registers; it begins with the first tokens of the strips behind, whose slopes are computed
    twice. What the next step needs is loaded a step ahead.
    """
    strip = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = (strip // strips).to(tl.int64)
    first = (strip % strips * LENGTH).to(tl.int64)
    col = tl.program_id(1) * width + tl.arange(0, BLOCK_D)
    used = (tl.arange(0, BLOCK_D) < width) & (col < channels)
    start = (row * tokens)[:, None] * channels + col[None, :]
    # Strips behind the last row have no tokens.
    tokens = tl.where(row < rows, tokens, 0)
    zero = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=used, other=0.0).to(tl.float32)
    token = first + LENGTH + TAPS - 2
    weights, dweights, seen, behind = (), (), (), ()
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + col * TAPS + tap, mask=used, other=0.0).to(tl.float32)
        weights = appended(weights, weight[None, :])
        dweights = appended(dweights, zero)
        x = columns_of(x_ptr, start, token - (TAPS - 1 - tap), tokens, channels, used)
        seen = appended(seen, x)
        if tap > 0:
            behind = appended(behind, zero)
    dbias = zero
    dy = columns_of(dy_ptr, start, token, tokens, channels, used)
    for _ in range(0, LENGTH + TAPS - 1):
        next_x = columns_of(x_ptr, start, token - TAPS, tokens, channels, used)
        next_dy = columns_of(dy_ptr, start, token - 1, tokens, channels, used)
        inside = token < tokens
        place = place_of(place_ptr, token, tokens)
        z = zero + bias[None, :]
        for tap in tl.static_range(TAPS):
            x = tl.where((place >= TAPS - 1 - tap)[:, None], seen[tap], 0.0)
            z += x * weights[tap]
        s = tl.sigmoid(z)
        dz = dy
        if UNIT:
            y = tl.where(used[None, :], z * s, 0.0)
            inverse = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
            dz = inverse * (dz - y * inverse * inverse * tl.sum(dz * y, 1)[:, None])
        dz = tl.where(inside[:, None], dz * s * (1.0 + z * (1.0 - s)), 0.0)

        own = (token < first + LENGTH)[:, None]
        dbias += tl.where(own, dz, 0.0)
        found = ()
        dx = dz * weights[TAPS - 1]
        for tap in tl.static_range(TAPS):
            reads = own & (place >= TAPS - 1 - tap)[:, None]
            found = appended(found, dweights[tap] + tl.where(reads, dz * seen[tap], 0.0))
        for after in tl.static_range(1, TAPS):
            reads = place_of(place_ptr, token + after, tokens) >= after
            dx += tl.where(reads[:, None], behind[after - 1], 0.0) * weights[TAPS - 1 - after]
        dweights = found
        if TAPS > 1:
            behind = shifted(behind, dz, TAPS - 1)
        dx = as_operand(dx, dx_ptr.dtype.element_ty, UPCAST)
        at = dx_ptr + start + token[:, None] * channels
        tl.store(at, dx, mask=own & inside[:, None] & used[None, :])
        seen = shifted(seen, next_x, TAPS)
        dy = next_dy
        token -= 1
    share = shares_ptr + tl.program_id(0).to(tl.int64) * ((TAPS + 1) * channels) + col
    for tap in tl.static_range(TAPS):
        tl.store(share + tap * channels, tl.sum(dweights[tap], 0), mask=used)
    tl.store(share + TAPS * channels, tl.sum(dbias, 0), mask=used)
