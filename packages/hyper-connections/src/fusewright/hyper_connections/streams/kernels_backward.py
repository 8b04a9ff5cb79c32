"""The gradients of writing to streams and of reading them.

With g the gradient of x', and ds that of s by way of the gates,

    dx_j = sum_i res_ij g_i    dy = sum_i post_i g_i    dres_ij = g_i . x_j    dpost_i = g_i . y
    dpre_i = du . x_i          ds_hat = alpha ds        r = 1 / rms(v)         dm = r ds_hat
    dv = pre du + Phi^T dm - v r^2 / D sum(ds_hat s_hat)
    dPhi = sum over tokens of dm v^T

to which reading adds the gradients of the streams that it returned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import gate_logits, load_rows, sigmoid, store_rows, streams_of


@triton.jit(do_not_specialize=("tokens",))
def stream_write_backward_kernel(
    g_ptr,
    x_ptr,
    res_ptr,
    post_ptr,
    y_ptr,
    dx_ptr,
    dres_ptr,
    dpost_ptr,
    dy_ptr,
    tokens,
    C,
    n: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program takes BLOCK tokens, BLOCK_C columns of all streams at a time."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within, row = token < tokens, token.to(tl.int64)
    # Of dpost, then of dres by columns.
    sums = tl.tuple(())
    for _ in tl.static_range(n + n * n):
        sums += (tl.zeros([BLOCK], tl.float32),)
    for first in range(0, C, BLOCK_C):
        col = first + tl.arange(0, BLOCK_C)
        g = streams_of(g_ptr, token, col, tokens, C, n)
        y = load_rows(y_ptr, token, col, tokens, C, C)
        dy = tl.zeros([BLOCK, BLOCK_C], tl.float32)
        added = tl.tuple(())
        for i in tl.static_range(n):
            post = tl.load(post_ptr + row * n + i, mask=within, other=0.0)
            dy += post[:, None] * g[i]
            added += (sums[i] + tl.sum(g[i] * y, 1),)
        store_rows(dy_ptr, dy, token, col, tokens, C, C)
        for j in tl.static_range(n):
            x = load_rows(x_ptr + j * C, token, col, tokens, n * C, C)
            dx = tl.zeros([BLOCK, BLOCK_C], tl.float32)
            for i in tl.static_range(n):
                res = tl.load(res_ptr + row * (n * n) + i * n + j, mask=within, other=0.0)
                dx += res[:, None] * g[i]
                added += (sums[n + j * n + i] + tl.sum(g[i] * x, 1),)
            store_rows(dx_ptr + j * C, dx, token, col, tokens, n * C, C)
        sums = added
    for i in tl.static_range(n):
        tl.store(dpost_ptr + row * n + i, sums[i], mask=within)
        for j in tl.static_range(n):
            tl.store(dres_ptr + row * (n * n) + i * n + j, sums[n + j * n + i], mask=within)


@triton.jit(do_not_specialize=("tokens",))
def stream_gates_backward_kernel(
    du_ptr,
    dpost_ptr,
    dlogits_ptr,
    x_ptr,
    s_hat_ptr,
    scale_ptr,
    alpha_ptr,
    bias_ptr,
    dm_ptr,
    pull_ptr,
    shares_ptr,
    tokens,
    C,
    n: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program takes every num_programs-th block of BLOCK tokens: dm, what v is multiplied by in
    its own gradient, and a partial sum of dbias and dalpha.
    """
    part = tl.arange(0, PARTS)
    parts: tl.constexpr = n * (n + 2)
    of_pre, of_post = part < n, (part >= n) & (part < 2 * n)
    of_res = (part >= 2 * n) & (part < parts)
    dbias = tl.zeros([PARTS], tl.float32)
    dalpha = tl.zeros([PARTS], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK), tl.num_programs(0)):
        token = block * BLOCK + tl.arange(0, BLOCK)
        dpre = tl.tuple(())
        for _ in tl.static_range(n):
            dpre += (tl.zeros([BLOCK], tl.float32),)
        for first in range(0, C, BLOCK_C):
            col = first + tl.arange(0, BLOCK_C)
            du = load_rows(du_ptr, token, col, tokens, C, C)
            x = streams_of(x_ptr, token, col, tokens, C, n)
            added = tl.tuple(())
            for i in tl.static_range(n):
                added += (dpre[i] + tl.sum(du * x[i], 1),)
            dpre = added

        s_hat = load_rows(s_hat_ptr, token, part, tokens, parts, parts)
        s, alpha = gate_logits(s_hat, alpha_ptr, bias_ptr, n, PARTS)
        gate = sigmoid(s)
        slope = gate * (1.0 - gate)
        dpost = load_rows(dpost_ptr, token, part - n, tokens, n, n)
        dlogits = load_rows(dlogits_ptr, token, part - 2 * n, tokens, n * n, n * n)
        ds = 2.0 * slope * dpost + dlogits
        for i in tl.static_range(n):
            ds = tl.where((part == i)[None, :], slope * dpre[i][:, None], ds)

        scale = tl.load(scale_ptr + token, mask=token < tokens, other=0.0)
        ds_hat = alpha[None, :] * ds
        along = tl.sum(ds_hat * s_hat, 1)
        tl.store(pull_ptr + token, -along * scale * scale / (n * C), mask=token < tokens)
        store_rows(dm_ptr, scale[:, None] * ds_hat, token, part, tokens, parts, parts)
        dbias += tl.sum(ds, 0)
        dalpha += tl.sum(ds * s_hat, 0)

    shares = shares_ptr + tl.program_id(0).to(tl.int64) * (parts + 3)
    tl.store(shares + part, dbias, mask=part < parts)
    tl.store(shares + parts, tl.sum(tl.where(of_pre, dalpha, 0.0), 0))
    tl.store(shares + parts + 1, tl.sum(tl.where(of_post, dalpha, 0.0), 0))
    tl.store(shares + parts + 2, tl.sum(tl.where(of_res, dalpha, 0.0), 0))


@triton.jit(do_not_specialize=("tokens",))
def stream_read_backward_kernel(
    du_ptr,
    x_ptr,
    s_hat_ptr,
    dm_ptr,
    pull_ptr,
    phi_ptr,
    alpha_ptr,
    bias_ptr,
    dmixed_ptr,
    dorigin_ptr,
    dx_ptr,
    shares_ptr,
    tokens,
    C,
    n: tl.constexpr,
    NEGATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program keeps BLOCK_C columns of one stream and takes every num_programs(1)-th block of
    BLOCK tokens: dx of these columns, and a partial sum of dPhi.
    """
    blocks = tl.cdiv(C, BLOCK_C)
    stream = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.arange(0, PARTS)
    parts: tl.constexpr = n * (n + 2)
    D = n * C
    x_ptr += stream * C
    dx_ptr += stream * C

    alpha, bias = tl.load(alpha_ptr), tl.load(bias_ptr + stream)
    in_phi = part[:, None] * D + (stream * C + col)[None, :]
    in_phi_inside = (part < parts)[:, None] & (col < C)[None, :]
    phi = tl.load(phi_ptr + in_phi, mask=in_phi_inside, other=0.0)
    dphi = tl.zeros([PARTS, BLOCK_C], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(tokens, BLOCK), tl.num_programs(1)):
        token = block * BLOCK + tl.arange(0, BLOCK)
        within, row = token < tokens, token.to(tl.int64)
        pull = tl.load(pull_ptr + token, mask=within, other=0.0)
        s_hat = tl.load(s_hat_ptr + row * parts + stream, mask=within, other=0.0)
        pre = sigmoid(alpha * s_hat + bias)
        dx = pre[:, None] * load_rows(du_ptr, token, col, tokens, C, C)
        if dmixed_ptr is not None:
            dx += load_rows(dmixed_ptr + stream * C, token, col, tokens, D, C)
        if dorigin_ptr is not None:
            more = load_rows(dorigin_ptr + stream * C, token, col, tokens, D, C)
            dx += -more if NEGATED else more
        x = load_rows(x_ptr, token, col, tokens, D, C)
        dm = load_rows(dm_ptr, token, part, tokens, parts, parts)
        dphi = tl.dot(tl.trans(dm), x, dphi, input_precision="tf32x3")
        dx += pull[:, None] * x
        dx = tl.dot(dm, phi, dx, input_precision="tf32x3")
        store_rows(dx_ptr, dx, token, col, tokens, D, C)

    shares = shares_ptr + tl.program_id(1).to(tl.int64) * (parts * D)
    tl.store(shares + in_phi, dphi, mask=in_phi_inside)
