"""Reading streams and writing to them: each one launch, and one pass over the streams but for what
the second part of reading finds in the cache.

Streams are ``[tokens, n, C]``, contiguous; v of a token is a row of D = n C numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places(pointer, token, col, tokens, width, columns):
    """Where the columns ``col`` of some tokens' rows lie, and which of them are there."""
    at = pointer + token.to(tl.int64)[:, None] * width + col[None, :]
    return at, (token < tokens)[:, None] & ((col >= 0) & (col < columns))[None, :]


@triton.jit
def load_rows(pointer, token, col, tokens, width, columns):
    """In fp32, zeros where there is nothing."""
    at, there = places(pointer, token, col, tokens, width, columns)
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, value, token, col, tokens, width, columns):
    at, there = places(pointer, token, col, tokens, width, columns)
    tl.store(at, value.to(pointer.dtype.element_ty), mask=there)


@triton.jit
def streams_of(x_ptr, token, col, tokens, C, n: tl.constexpr):
    """A tile of each of n streams."""
    streams = tl.tuple(())
    for i in tl.static_range(n):
        streams += (load_rows(x_ptr + i * C, token, col, tokens, n * C, C),)
    return streams


@triton.jit
def gate_logits(s_hat, alpha_ptr, bias_ptr, n: tl.constexpr, PARTS: tl.constexpr):
    """s = alpha s_hat + b of ``[tokens, PARTS]``, and the alpha of each part."""
    part = tl.arange(0, PARTS)
    there = part < n * (n + 2)
    kind = (part >= n).to(tl.int32) + (part >= 2 * n).to(tl.int32)
    alpha = tl.load(alpha_ptr + kind, mask=there, other=0.0)
    bias = tl.load(bias_ptr + part, mask=there, other=0.0)
    return alpha[None, :] * s_hat + bias[None, :], alpha


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def column(tile, index: tl.constexpr, WIDTH: tl.constexpr):
    """One column of a tile that is WIDTH wide."""
    return tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == index, tile, 0.0), 1)


@triton.jit(do_not_specialize=("tokens",))
def stream_read_kernel(
    x_ptr,
    phi_ptr,
    alpha_ptr,
    bias_ptr,
    u_ptr,
    post_ptr,
    logits_ptr,
    s_hat_ptr,
    scale_ptr,
    tokens,
    C,
    eps,
    n: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program reads BLOCK tokens: their gates, from all of v, then u."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col, part = tl.arange(0, BLOCK_C), tl.arange(0, PARTS)
    parts: tl.constexpr = n * (n + 2)
    D = n * C

    m = tl.zeros([BLOCK, PARTS], tl.float32)
    squares = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    # All streams of some columns, then of the next: u takes the last ones first, which the cache
    # still has.
    for step in range(n * tl.cdiv(C, BLOCK_C)):
        stream, first = step % n, step // n * BLOCK_C
        v = load_rows(x_ptr + stream * C, token, first + col, tokens, D, C)
        in_phi = phi_ptr + part[None, :] * D + (stream * C + first + col)[:, None]
        there = (part < parts)[None, :] & (first + col < C)[:, None]
        phi = tl.load(in_phi, mask=there, other=0.0)
        m = tl.dot(v, phi, m, input_precision="tf32x3")
        squares += v * v
    scale = tl.rsqrt(tl.sum(squares, 1) / D + eps)
    s_hat = m * scale[:, None]
    s, _ = gate_logits(s_hat, alpha_ptr, bias_ptr, n, PARTS)
    gate = sigmoid(s)

    within = token < tokens
    tl.store(scale_ptr + token, scale, mask=within)
    store_rows(s_hat_ptr, s_hat, token, part, tokens, parts, parts)
    store_rows(post_ptr, 2.0 * gate, token, part - n, tokens, n, n)
    store_rows(logits_ptr, s, token, part - 2 * n, tokens, n * n, n * n)

    pre = tl.tuple(())
    for i in tl.static_range(n):
        pre += (column(gate, i, PARTS),)
    blocks = tl.cdiv(C, BLOCK_C)
    for back in range(blocks):
        here = (blocks - 1 - back) * BLOCK_C + col
        u = tl.zeros([BLOCK, BLOCK_C], tl.float32)
        for i in tl.static_range(n):
            u += pre[i][:, None] * load_rows(x_ptr + i * C, token, here, tokens, D, C)
        store_rows(u_ptr, u, token, here, tokens, C, C)


@triton.jit(do_not_specialize=("tokens",))
def stream_write_kernel(
    x_ptr,
    res_ptr,
    post_ptr,
    y_ptr,
    origin_ptr,
    out_ptr,
    tokens,
    C,
    n: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program writes BLOCK_C columns of all streams of BLOCK tokens: res x + post y, less the
    origin.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    within, row = token < tokens, token.to(tl.int64)
    x = streams_of(x_ptr, token, col, tokens, C, n)
    y = load_rows(y_ptr, token, col, tokens, C, C)
    for i in tl.static_range(n):
        new = tl.zeros([BLOCK, BLOCK_C], tl.float32)
        for j in tl.static_range(n):
            res = tl.load(res_ptr + row * (n * n) + i * n + j, mask=within, other=0.0)
            new += res[:, None] * x[j]
        post = tl.load(post_ptr + row * n + i, mask=within, other=0.0)
        new += post[:, None] * y
        if origin_ptr is not None:
            new -= load_rows(origin_ptr + i * C, token, col, tokens, n * C, C)
        store_rows(out_ptr + i * C, new, token, col, tokens, n * C, C)
