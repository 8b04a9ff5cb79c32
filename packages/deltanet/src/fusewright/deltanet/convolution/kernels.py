"""The short convolution with its SiLU and the unit length of a head's columns, forward and
backward, over [B, T, channels]. With s = sigmoid(z):

    z_t = bias + sum_j weight_j x_(t - taps + 1 + j),  u = z s,  y = u or u / |u|, by head
    du = dy or (dy - y (dy . y)) / |u|,  dz = du s (1 + z (1 - s))
    dx_t = sum_j weight_j dz_(t + taps - 1 - j),  dweight_j = sum_t dz_t x_(t - taps + 1 + j)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import as_operand

# Added to the square of a row's length.
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def load_place(place_ptr, token, tokens):
    """The position of each token in its sequence, which the row is where there is no table."""
    place = token
    if place_ptr is not None:
        place = tl.load(place_ptr + token, mask=token < tokens, other=0)
    return place


@triton.jit
def load_columns(ptr, start, token, tokens, channels, used):
    """The columns of some tokens in fp32, of rows that begin at ``start``; zeros for tokens outside
    the row.
    """
    exists = (token >= 0) & (token < tokens)
    at = ptr + start + token[:, None] * channels
    return tl.load(at, mask=exists[:, None] & used[None, :], other=0.0).to(tl.float32)


@triton.jit
def append(items, item):
    """The tuple with one more item at its end; triton has no star expression."""
    return items + (item,)  # noqa: RUF005


@triton.jit
def shift(items, item, COUNT: tl.constexpr):
    """The tuple of COUNT items without its last one, ``item`` in front."""
    return (item,) + items[0 : COUNT - 1]  # noqa: RUF005


@triton.jit(do_not_specialize=("tokens",))
def convolution_kernel(
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
    """One program computes BLOCK_T tokens of ``width`` channels, with UNIT those of one head."""
    blocks = tl.cdiv(tokens, BLOCK_T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # A row, too, can have more than 2**31 numbers.
    token = (tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    place = load_place(place_ptr, token, tokens)
    col = tl.program_id(1) * width + tl.arange(0, BLOCK_D)
    used = (tl.arange(0, BLOCK_D) < width) & (col < channels)
    start = row * tokens * channels + col[None, :]
    z = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + col, mask=used, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        before = TAPS - 1 - tap
        x = load_columns(x_ptr, start, token - before, tokens, channels, used)
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
def convolution_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    place_ptr,
    dx_ptr,
    partial_sums_ptr,
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
    """One program computes dx of BLOCK_S strips of LENGTH tokens, of ``width`` channels, and its
    partial sums of the gradients of taps and bias, [programs of strips, TAPS + 1, channels].

    A token's x enters its own output and those of the TAPS - 1 tokens after it. So the program
    loops over its strips from the last token to the first and keeps a window of x up to the token
    and the dz of the tokens after it in registers. It starts in the first tokens of the strips that
    follow, whose dz is therefore computed twice. Each iteration loads x and dy of the next one.
    """
    strip = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = (strip // strips).to(tl.int64)
    first = (strip % strips * LENGTH).to(tl.int64)
    col = tl.program_id(1) * width + tl.arange(0, BLOCK_D)
    used = (tl.arange(0, BLOCK_D) < width) & (col < channels)
    start = (row * tokens)[:, None] * channels + col[None, :]
    # Strips past the last row have no tokens.
    tokens = tl.where(row < rows, tokens, 0)
    zero = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=used, other=0.0).to(tl.float32)
    token = first + LENGTH + TAPS - 2
    weights, dweights, window, later_dz = (), (), (), ()
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + col * TAPS + tap, mask=used, other=0.0).to(tl.float32)
        weights = append(weights, weight[None, :])
        dweights = append(dweights, zero)
        x = load_columns(x_ptr, start, token - (TAPS - 1 - tap), tokens, channels, used)
        window = append(window, x)
        if tap > 0:
            later_dz = append(later_dz, zero)
    dbias = zero
    dy = load_columns(dy_ptr, start, token, tokens, channels, used)
    for _ in range(0, LENGTH + TAPS - 1):
        next_x = load_columns(x_ptr, start, token - TAPS, tokens, channels, used)
        next_dy = load_columns(dy_ptr, start, token - 1, tokens, channels, used)
        inside = token < tokens
        place = load_place(place_ptr, token, tokens)
        z = zero + bias[None, :]
        for tap in tl.static_range(TAPS):
            x = tl.where((place >= TAPS - 1 - tap)[:, None], window[tap], 0.0)
            z += x * weights[tap]
        s = tl.sigmoid(z)
        dz = dy
        if UNIT:
            y = tl.where(used[None, :], z * s, 0.0)
            rlength = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
            dz = rlength * (dz - y * rlength * rlength * tl.sum(dz * y, 1)[:, None])
        dz = tl.where(inside[:, None], dz * s * (1.0 + z * (1.0 - s)), 0.0)

        in_strip = (token < first + LENGTH)[:, None]
        dbias += tl.where(in_strip, dz, 0.0)
        sums = ()
        dx = dz * weights[TAPS - 1]
        for tap in tl.static_range(TAPS):
            reads = in_strip & (place >= TAPS - 1 - tap)[:, None]
            sums = append(sums, dweights[tap] + tl.where(reads, dz * window[tap], 0.0))
        for after in tl.static_range(1, TAPS):
            reads = load_place(place_ptr, token + after, tokens) >= after
            dx += tl.where(reads[:, None], later_dz[after - 1], 0.0) * weights[TAPS - 1 - after]
        dweights = sums
        if TAPS > 1:
            later_dz = shift(later_dz, dz, TAPS - 1)
        dx = as_operand(dx, dx_ptr.dtype.element_ty, UPCAST)
        at = dx_ptr + start + token[:, None] * channels
        tl.store(at, dx, mask=in_strip & inside[:, None] & used[None, :])
        window = shift(window, next_x, TAPS)
        dy = next_dy
        token -= 1
    partial_sums = partial_sums_ptr + tl.program_id(0).to(tl.int64) * ((TAPS + 1) * channels) + col
    for tap in tl.static_range(TAPS):
        tl.store(partial_sums + tap * channels, tl.sum(dweights[tap], 0), mask=used)
    tl.store(partial_sums + TAPS * channels, tl.sum(dbias, 0), mask=used)
