"""Triton kernels of the indexer's loss: the attention's probabilities, and the divergence of the
softmax of the indexer's scores from them.

    p_ts = sum_h exp(s_hts - lse_ht) over its sum over s    s_hts = scale q_ht . k_s
    r_ts = softmax_s(temperature I_ts)    loss_t = sum_s p_ts (log p_ts - log r_ts)
    G_ts = r_ts - p_ts                    dtemperature_t = sum_s G_ts I_ts
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import (
    LOG2_E,
    LOG_2,
    load_ranges,
    load_rows,
    product,
    range_of_tile,
    zeros,
)

# Below every score, and finite: its distance to itself is zero.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def target_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    ranges_ptr,
    target_ptr,
    scale,
    q_batch_stride,
    q_row_stride,
    q_head_stride,
    k_batch_stride,
    k_row_stride,
    k_head_stride,
    lse_batch_stride,
    lse_head_stride,
    lse_row_stride,
    queries,
    keys,
    heads,
    shared,
    offset,
    CONFIG: tl.constexpr,
):
    """One program adds the probabilities of all heads for BLOCK_Q queries and BLOCK_K keys;
    ``shared``: so many heads have one head of keys. Tiles that no row may see are left as they are.
    """
    key_tiles = tl.cdiv(keys, CONFIG.BLOCK_K)
    row_tiles = tl.cdiv(queries, CONFIG.BLOCK_Q)
    tile = tl.program_id(0) // key_tiles
    batch = (tile // row_tiles).to(tl.int64)
    start = tile % row_tiles * CONFIG.BLOCK_Q
    first_key = tl.program_id(0) % key_tiles * CONFIG.BLOCK_K
    row, key = start + tl.arange(0, CONFIG.BLOCK_Q), first_key + tl.arange(0, CONFIG.BLOCK_K)
    visible = True
    if CONFIG.CAUSAL:
        visible = first_key <= offset + start + CONFIG.BLOCK_Q - 1
    if ranges_ptr is not None:
        of_rows = load_ranges(ranges_ptr + 2 * batch * queries, row, row < queries)
        begin, end = range_of_tile(*of_rows)
        visible = visible & (first_key < end) & (first_key + CONFIG.BLOCK_K > begin)
    if visible:
        total = zeros(CONFIG.BLOCK_Q, CONFIG.BLOCK_K)
        for head in range(heads):
            at = tl.cast(head, tl.int64)
            q_corner = q_ptr + batch * q_batch_stride + at * q_head_stride
            q = load_rows(q_corner, start, queries, q_row_stride, CONFIG.BLOCK_Q, CONFIG)
            k_corner = k_ptr + batch * k_batch_stride + at // shared * k_head_stride
            k = load_rows(k_corner, first_key, keys, k_row_stride, CONFIG.BLOCK_K, CONFIG)
            lse_at = lse_ptr + batch * lse_batch_stride + at * lse_head_stride
            lse_at += row.to(tl.int64) * lse_row_stride
            lse = tl.load(lse_at, mask=row < queries, other=0.0).to(tl.float32)
            s = product(q, tl.trans(k), CONFIG) * (scale * LOG2_E)
            # A row without keys has no probabilities.
            p = tl.exp2(s - (lse * LOG2_E)[:, None])
            total += tl.where((lse > float("-inf"))[:, None], p, 0.0)
        to_row = (batch * queries + row) * keys
        inside = (row < queries)[:, None] & (key < keys)[None, :]
        tl.store(target_ptr + to_row[:, None] + key[None, :], total, mask=inside)


@triton.jit
def counted_keys(selection, key, seen, AGAIN: tl.constexpr):
    """Which of these keys the loss of a row counts, and how often; ``seen``: from which key on
    (None: from the first) and before which the row sees them.
    """
    bits_at, indices_at, last = selection
    first, visible = seen
    counts, times = key < visible, 1.0
    if first is not None:
        counts = counts & (key >= first)
    if AGAIN:
        named = tl.zeros(key.shape, tl.int32)
        for slot in range(0, last):
            named += (tl.load(indices_at + slot) == key).to(tl.int32)
        counts = counts & (named > 0)
        times = named.to(tl.float32)
    elif bits_at is not None:
        word = tl.load(bits_at + (key >> 5), mask=counts, other=0)
        counts = counts & (((word >> (key & 31)) & 1) != 0)
    return counts, times


@triton.jit
def divergence_of_row(
    scores_at,
    target_at,
    selection,
    temperature_ptr,
    loss_at,
    slope_at,
    keys,
    seen,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence of a row and its slopes. AGAIN: the row names keys in several slots; it has no
    bits, and its slots are gone through for every key.
    """
    step = tl.arange(0, BLOCK)
    first, visible = seen
    begin, end = 0, keys
    if first is not None:
        # Of other documents nothing is read or written.
        begin, end = first // BLOCK * BLOCK, visible
    temperature = tl.load(temperature_ptr).to(tl.float32)
    # Exponents are distances of scores to the one that weighs most: rounding a logarithm of z, or a
    # score times the temperature, would move all weights of a row at once, and their differences to
    # the target cancel.
    sign = tl.where(temperature < 0.0, -1.0, 1.0)
    factor = sign * temperature * LOG2_E

    highest = tl.full([BLOCK], LOWEST, tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, visible, BLOCK):
        key = start + step
        counts, times = counted_keys(selection, key, seen, AGAIN)
        score = tl.load(scores_at + key, mask=counts, other=0.0)
        height = tl.where(counts, sign * score, LOWEST)
        next_highest = tl.maximum(highest, height)
        rescale = tl.exp2((highest - next_highest) * factor)
        weight = tl.where(counts, tl.exp2((height - next_highest) * factor), 0.0) * times
        z = z * rescale + weight
        weighted = weighted * rescale + weight * score
        highest = next_highest
        total += tl.load(target_at + key, mask=counts, other=0.0) * times
    top = tl.max(highest, 0)
    rescale = tl.exp2((highest - top) * factor)
    z_all = tl.sum(z * rescale, 0)
    # A row without keys has no sum, and nothing to take distances to.
    top, z_all = tl.where(z_all == 0.0, 0.0, top), tl.where(z_all == 0.0, 1.0, z_all)
    log_z, inverse_z = tl.log2(z_all), tl.div_rn(1.0, z_all)
    # The differences of a row add to zero: against the mean of its scores none of their rounding
    # errors is multiplied by a whole score.
    middle = tl.sum(weighted * rescale, 0) * inverse_z
    mass = tl.sum(total, 0)
    # A row without target adds nothing to the loss.
    inverse_mass = tl.where(mass > 0.0, tl.div_rn(1.0, tl.where(mass > 0.0, mass, 1.0)), 0.0)

    loss = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        key = start + step
        counts, times = counted_keys(selection, key, seen, AGAIN)
        score = tl.load(scores_at + key, mask=counts, other=0.0)
        x = (sign * score - top) * factor
        p = tl.load(target_at + key, mask=counts, other=0.0) * inverse_mass
        far = tl.log2(tl.where(p > 0.0, p, 1.0)) - x + log_z
        loss += tl.where(p > 0.0, p * far, 0.0) * times
        if slope_at is not None:
            g = tl.where(counts, tl.exp2(x) * inverse_z - p, 0.0) * times
            g = tl.where(mass > 0.0, g, 0.0)
            slope += g * (score - middle)
            tl.store(scores_at + key, g, mask=key < keys)
    tl.store(loss_at, tl.sum(loss, 0) * LOG_2)
    if slope_at is not None:
        tl.store(slope_at, tl.sum(slope, 0))


@triton.jit
def divergence_kernel(
    scores_ptr,
    target_ptr,
    indices_ptr,
    count_ptr,
    bits_ptr,
    ranges_ptr,
    temperature_ptr,
    loss_ptr,
    slope_ptr,
    queries,
    keys,
    offset,
    indices_batch_stride,
    indices_row_stride,
    count_batch_stride,
    count_row_stride,
    first,
    slots,
    words,
    marks,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes the divergence of one row, its derivative by the temperature and, in
    place of the scores, their gradients G: softmax less target.
    """
    row = tl.program_id(0).to(tl.int64)
    visible = keys
    if CAUSAL:
        visible = tl.minimum(keys, offset + tl.program_id(0) % queries + 1)
    scores_at, target_at = scores_ptr + row * keys, target_ptr + row * keys
    loss_at, slope_at = loss_ptr + row, None
    if slope_ptr is not None:
        slope_at = slope_ptr + row
    seen = (None, visible)
    if ranges_ptr is not None:
        begin, end = load_ranges(ranges_ptr, row, True)
        seen = (begin, tl.minimum(end, visible))
    rest = temperature_ptr, loss_at, slope_at, keys, seen
    if bits_ptr is None:
        divergence_of_row(scores_at, target_at, (None, None, 0), *rest, False, BLOCK)
    else:
        batch, query = row // queries, first + row % queries
        indices_at = indices_ptr + batch * indices_batch_stride + query * indices_row_stride
        last = slots
        if count_ptr is not None:
            count = tl.load(count_ptr + batch * count_batch_stride + query * count_row_stride)
            last = tl.minimum(count, slots).to(tl.int32)
        selection = bits_ptr + row * words, indices_at, last
        if tl.load(bits_ptr + marks + 1 + row) != 0:
            # Fewer keys at a time, whose times take no more registers than the other rows need.
            divergence_of_row(scores_at, target_at, selection, *rest, True, BLOCK // 4)
        else:
            divergence_of_row(scores_at, target_at, selection, *rest, False, BLOCK)
