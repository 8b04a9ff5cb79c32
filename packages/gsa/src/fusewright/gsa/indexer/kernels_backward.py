"""Triton kernels of the gradients of the indexer's scores, G the gradient of a score I:

    dz_ths = G_ts sigmoid(w_th) sigmoid'(z_ths)    dw_th = sigmoid'(w_th) sum_s G_ts sigmoid(z_ths)
    dq_th  = scale sum_s dz_ths k_s                db_h  = sum_ts dz_ths
    dk_s   = scale sum_th dz_ths q_th

Of the form with relu, w stands in the place of sigmoid(w), with a derivative of 1, and relu in that
of the other sigmoid.

One kernel goes over the keys of a tile of queries, the other over the queries of a tile of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import is_in_range, load_ranges, load_rows, product, range_of_tile, zeros
from .tiles import activation, gate_of


@triton.jit
def load_gradient(source, row, key, rows, keys, offset, of_rows, CONFIG: tl.constexpr):
    """The scores' gradient at these rows and keys; zero where a row does not see a key. ``source``:
    a pointer, and the strides of rows and keys; ``of_rows``: the rows' ranges, or None.
    """
    corner, row_stride, key_stride = source
    if of_rows is not None:
        # Ranges end with the keys, and rows beyond the last one have none.
        first, last = of_rows
        if CONFIG.CAUSAL:
            last = tl.minimum(last, offset + row + 1)
        inside = is_in_range(key, (first, tl.minimum(last, keys)))
    else:
        inside = (row < rows)[:, None] & (key < keys)[None, :]
        if CONFIG.CAUSAL:
            inside &= key[None, :] <= (offset + row)[:, None]
    to_row = row.to(tl.int64) * row_stride
    to_key = key.to(tl.int64) * key_stride
    at = corner + (to_row[:, None] + to_key[None, :])
    return tl.load(at, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def slope(q, k, bias, scale, g, seen, CONFIG: tl.constexpr):
    """g times the activation's derivative, and g times the activation; zero where a row does not
    see a key, whatever lies there.
    """
    y = activation(q, k, bias, scale, CONFIG)
    gy = tl.where(seen, g * y, 0.0)
    if CONFIG.GATED:
        g_slope = tl.where(seen, gy * (1.0 - y), 0.0)
    else:
        g_slope = tl.where(seen & (y > 0.0), g, 0.0)
    return g_slope, gy


@triton.jit
def scores_dq_kernel(
    dscores_ptr,
    q_ptr,
    k_ptr,
    w_ptr,
    bias_ptr,
    ranges_ptr,
    dq_ptr,
    dw_ptr,
    dbias_ptr,
    scale,
    dscores_batch_stride,
    dscores_row_stride,
    dscores_key_stride,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    w_batch_stride,
    w_row_stride,
    w_head_stride,
    queries,
    keys,
    heads,
    offset,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_Q rows of one head's dq and dw, and their part of its dbias."""
    tiles = tl.cdiv(queries, CONFIG.BLOCK_Q)
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads % tiles
    batch = (tl.program_id(0) // heads // tiles).to(tl.int64)
    start = tile * CONFIG.BLOCK_Q
    row = start + tl.arange(0, CONFIG.BLOCK_Q)
    q_corner = q_ptr + batch * q_batch_stride + head * q_head_stride
    q = load_rows(q_corner, start, queries, q_row_stride, CONFIG.BLOCK_Q, CONFIG)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    w_at = w_ptr + batch * w_batch_stride + row.to(tl.int64) * w_row_stride + head * w_head_stride
    gate = gate_of(tl.load(w_at, mask=row < queries, other=0.0), CONFIG)
    k_corner = k_ptr + batch * k_batch_stride
    dscores = (dscores_ptr + batch * dscores_batch_stride, dscores_row_stride, dscores_key_stride)

    dq = zeros(CONFIG.BLOCK_Q, CONFIG.BLOCK_D)
    dgate = zeros(CONFIG.BLOCK_Q)
    dbias = zeros(CONFIG.BLOCK_Q)
    first, last = 0, keys
    if CONFIG.CAUSAL:
        last = tl.minimum(keys, offset + start + CONFIG.BLOCK_Q)
    of_rows = None
    if ranges_ptr is not None:
        of_rows = load_ranges(ranges_ptr + 2 * batch * queries, row, row < queries)
        begin, end = range_of_tile(*of_rows)
        first, last = begin // CONFIG.BLOCK_K * CONFIG.BLOCK_K, tl.minimum(last, end)
    for first_key in tl.range(first, last, CONFIG.BLOCK_K, num_stages=CONFIG.NUM_STAGES):
        key = first_key + tl.arange(0, CONFIG.BLOCK_K)
        k = load_rows(k_corner, first_key, keys, k_row_stride, CONFIG.BLOCK_K, CONFIG)
        g, seen = load_gradient(dscores, row, key, queries, keys, offset, of_rows, CONFIG)
        # [BLOCK_Q, BLOCK_K]
        g_slope, gy = slope(q, k, bias, scale, g, seen, CONFIG)
        dgate += tl.sum(gy, 1)
        dz = g_slope * gate[:, None]
        dbias += tl.sum(dz, 1)
        dq += product(dz.to(k.dtype), k, CONFIG)

    to_row = (batch * queries + row) * heads + head
    col = tl.arange(0, CONFIG.BLOCK_D)
    inside = row < queries
    at = dq_ptr + (to_row[:, None] * CONFIG.D + col[None, :])
    mask = inside[:, None] & (col < CONFIG.D)[None, :]
    tl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
    dw = dgate
    if CONFIG.GATED:
        dw = dgate * gate * (1.0 - gate)
    tl.store(dw_ptr + to_row, dw.to(dw_ptr.dtype.element_ty), mask=inside)
    tl.store(dbias_ptr + tl.program_id(0), tl.sum(dbias, 0))


@triton.jit
def scores_dk_kernel(
    dscores_ptr,
    q_ptr,
    k_ptr,
    w_ptr,
    bias_ptr,
    ranges_ptr,
    seeing_ptr,
    dk_ptr,
    scale,
    dscores_batch_stride,
    dscores_row_stride,
    dscores_key_stride,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    w_batch_stride,
    w_row_stride,
    w_head_stride,
    queries,
    keys,
    heads,
    offset,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_K rows of dk: over the queries that may see them, and over all
    heads of these. ``seeing``: of each tile the first row that may see it, and one behind the last.
    """
    tiles = tl.cdiv(keys, CONFIG.BLOCK_K)
    first_key = tl.program_id(0) % tiles * CONFIG.BLOCK_K
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    key = first_key + tl.arange(0, CONFIG.BLOCK_K)
    k_corner = k_ptr + batch * k_batch_stride
    k = load_rows(k_corner, first_key, keys, k_row_stride, CONFIG.BLOCK_K, CONFIG)
    dscores = (dscores_ptr + batch * dscores_batch_stride, dscores_row_stride, dscores_key_stride)

    dk = zeros(CONFIG.BLOCK_K, CONFIG.BLOCK_D)
    begin, end = 0, queries
    if CONFIG.CAUSAL:
        begin = tl.maximum(first_key - offset, 0) // CONFIG.BLOCK_Q * CONFIG.BLOCK_Q
    if ranges_ptr is not None:
        low, end = load_ranges(seeing_ptr, tl.program_id(0), True)
        begin = tl.maximum(begin, low // CONFIG.BLOCK_Q * CONFIG.BLOCK_Q)
    for start in range(begin, end, CONFIG.BLOCK_Q):
        row = start + tl.arange(0, CONFIG.BLOCK_Q)
        of_rows = None
        if ranges_ptr is not None:
            of_rows = load_ranges(ranges_ptr + 2 * batch * queries, row, row < queries)
        g, seen = load_gradient(dscores, row, key, queries, keys, offset, of_rows, CONFIG)
        w_corner = w_ptr + batch * w_batch_stride + row.to(tl.int64) * w_row_stride
        for head in tl.range(0, heads, num_stages=CONFIG.NUM_STAGES):
            q_corner = q_ptr + batch * q_batch_stride + tl.cast(head, tl.int64) * q_head_stride
            q = load_rows(q_corner, start, queries, q_row_stride, CONFIG.BLOCK_Q, CONFIG)
            w = tl.load(w_corner + head * w_head_stride, mask=row < queries, other=0.0)
            bias = tl.load(bias_ptr + head).to(tl.float32)
            g_slope, _ = slope(q, k, bias, scale, g, seen, CONFIG)
            dz = g_slope * gate_of(w, CONFIG)[:, None]
            dk += product(tl.trans(dz.to(q.dtype)), q, CONFIG)

    col = tl.arange(0, CONFIG.BLOCK_D)
    at = dk_ptr + ((batch * keys + key)[:, None] * CONFIG.D + col[None, :])
    mask = (key < keys)[:, None] & (col < CONFIG.D)[None, :]
    tl.store(at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=mask)
