"""Triton kernel of the indexer's scores, for the op, for the selection's rows and for the loss.

I_ts = sum_h sigmoid(w_th) sigmoid(scale q_th . k_s + b_h)
    or sum_h w_th relu(scale q_th . k_s + b_h)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import is_in_range, load_ranges, load_rows, range_of_tile, zeros
from .tiles import activation, gate_of


@triton.jit
def scores_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    bias_ptr,
    ranges_ptr,
    scores_ptr,
    scale,
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
    first_row,
    last_row,
    last_key,
    CONFIG: tl.constexpr,
):
    """One program computes BLOCK_Q x BLOCK_K scores, all heads of them, among the rows from
    ``first_row`` to ``last_row`` and the keys before ``last_key``, which the output holds alone.
    Without FILL, tiles that no row may see are left as they are.
    """
    key_tiles = tl.cdiv(last_key, CONFIG.BLOCK_K)
    row_tiles = tl.cdiv(last_row - first_row, CONFIG.BLOCK_Q)
    tile = tl.program_id(0) // key_tiles
    batch = (tile // row_tiles).to(tl.int64)
    start = first_row + tile % row_tiles * CONFIG.BLOCK_Q
    first_key = tl.program_id(0) % key_tiles * CONFIG.BLOCK_K
    row, key = start + tl.arange(0, CONFIG.BLOCK_Q), first_key + tl.arange(0, CONFIG.BLOCK_K)
    inside = (row < last_row)[:, None] & (key < last_key)[None, :]
    width = (last_row - first_row).to(tl.int64)
    corner = scores_ptr + (batch * width + (start - first_row)) * last_key + first_key
    to_score = tl.arange(0, CONFIG.BLOCK_Q)[:, None].to(tl.int64) * last_key
    to_score += tl.arange(0, CONFIG.BLOCK_K)[None, :]

    visible = True
    if CONFIG.CAUSAL:
        visible = first_key <= offset + start + CONFIG.BLOCK_Q - 1
    if ranges_ptr is not None:
        of_rows = load_ranges(ranges_ptr + 2 * batch * queries, row, row < last_row)
        begin, end = range_of_tile(*of_rows)
        visible = visible & (first_key < end) & (first_key + CONFIG.BLOCK_K > begin)
    if visible:
        k_corner = k_ptr + batch * k_batch_stride
        k = load_rows(k_corner, first_key, keys, k_row_stride, CONFIG.BLOCK_K, CONFIG)
        w_corner = w_ptr + batch * w_batch_stride + row.to(tl.int64) * w_row_stride
        # [BLOCK_Q, BLOCK_K]
        scores = zeros(CONFIG.BLOCK_Q, CONFIG.BLOCK_K)
        for head in range(heads):
            q_corner = q_ptr + batch * q_batch_stride + tl.cast(head, tl.int64) * q_head_stride
            q = load_rows(q_corner, start, queries, q_row_stride, CONFIG.BLOCK_Q, CONFIG)
            w = tl.load(w_corner + head * w_head_stride, mask=row < queries, other=0.0)
            bias = tl.load(bias_ptr + head).to(tl.float32)
            scores += gate_of(w, CONFIG)[:, None] * activation(q, k, bias, scale, CONFIG)
        if CONFIG.CAUSAL:
            seen = key[None, :] <= (offset + row)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if ranges_ptr is not None:
            scores = tl.where(is_in_range(key, of_rows), scores, float("-inf"))
        tl.store(corner + to_score, scores, mask=inside)
    elif CONFIG.FILL:
        nothing = zeros(CONFIG.BLOCK_Q, CONFIG.BLOCK_K) - float("inf")
        tl.store(corner + to_score, nothing, mask=inside)
