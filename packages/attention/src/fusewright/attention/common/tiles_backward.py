"""Device functions of backward passes over many keys.

    p = exp(s - m) / l,  ds = p * (do v^T - delta),  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

The probabilities are recomputed, from the scores and from the maximum m of each row and the
inverse 1 / l of its sum, as the forward pass had them: the rounding of a log-sum-exp would make the
probability of a great score wrong. delta takes o as it was before its rounding, as far as o and
o_low know: where one key has nearly all the weight, do v^T - delta is a small difference. In fp32
even that is not enough: two sums of the same products, do v^T and do o, are rounded differently.
There delta becomes rowsum(p * do v^T), computed while the keys pass, and dq is corrected for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import end_of, load_from_pointer, load_rows, product
from .tiles_forward import sink_of
from .tiles_rounding import load_unrounded


@triton.jit
def load_statistics(
    do,
    o_ptr,
    o_low_ptr,
    dlse_ptr,
    softmax_ptr,
    delta_ptr,
    place,
    rows,
    CONFIG: tl.constexpr,
    limit=None,
):
    """The maximum, one over the sum, delta and dlse of a tile of queries, [BLOCK_Q] each; the
    offsets of the rows, and which are inside: before ``limit``, or all that there are. delta is
    written too, except in fp32, where ``finished_dq`` has yet to subtract dlse and to correct it.
    """
    batch, head, first, queries, heads = place
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    end = end_of(queries, limit)
    # Rounding took nothing from fp32.
    if do.dtype != tl.float32:
        o = load_unrounded(o_ptr, o_low_ptr, place, BLOCK_Q, CONFIG.DV, CONFIG.BLOCK_V, limit)
    else:
        # May need 64 bits.
        task_stride = tl.cast(queries, tl.int64) * heads * CONFIG.DV
        o_source = o_ptr, task_stride, heads * CONFIG.DV, CONFIG.DV, batch, head, queries
        o = load_from_pointer(o_source, first, end, BLOCK_Q, True, CONFIG, True)
    row = first + tl.arange(0, BLOCK_Q)
    at = (batch * heads + head).to(tl.int64) * queries + row
    inside = row < end
    delta = tl.sum(do.to(tl.float32) * o, 1)
    dlse = tl.full([BLOCK_Q], 0.0, tl.float32)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if do.dtype != tl.float32:
        delta -= dlse
        tl.store(delta_ptr + at, delta, mask=inside)
    m = tl.load(softmax_ptr + at, mask=inside, other=0.0)
    inverse_sum = tl.load(softmax_ptr + rows + at, mask=inside, other=0.0)
    return m, inverse_sum, delta, dlse, at, inside


@triton.jit
def excess_of_sink(delta, m, inverse_sum, sinks_ptr, head, dtype: tl.constexpr):
    """The sink's part of a row's sum of ds, divided by the row's sum where ds is: a sink is a key
    without value.
    """
    excess = -tl.exp2(sink_of(sinks_ptr, head) - m) * delta
    if dtype == tl.float16:
        excess = excess * inverse_sum
    return excess


@triton.jit
def gradient_of_sink(
    excess, m, inverse_sum, delta, dlse, inside, sinks_ptr, head, dtype: tl.constexpr
):
    """What a tile of queries adds to dsink, -sum(p * delta), p that of the sink. delta is
    corrected: of narrow numbers it has the rounding of the probabilities of o, and the sum of ds,
    which should be zero, is what it errs by.
    """
    p = tl.exp2(sink_of(sinks_ptr, head) - m) * inverse_sum
    if dtype != tl.float16:
        excess = excess * inverse_sum
    return -tl.sum(tl.where(inside, p * (delta + excess - dlse), 0.0), 0)


@triton.jit
def score_gradients(q, k, v, do, m, inverse_sum, delta, factor, CONFIG: tl.constexpr):
    """p and ds of a tile of scores, [queries, keys], not yet divided by the row's sum; ds of fp16,
    whose range it might leave, already is.
    """
    p = tl.exp2(product(q, tl.trans(k), CONFIG) * factor - m[:, None])
    ds = p * (product(do, tl.trans(v), CONFIG) - delta[:, None])
    if q.dtype == tl.float16:
        ds = ds * inverse_sum[:, None]
    return p, ds


@triton.jit
def add_keys(dq, pk, excess, p, ds, k, CONFIG: tl.constexpr, WITH_SINK: tl.constexpr = False):
    """dq [queries, D] with the terms of a tile of keys; in fp32 also sum(p k), for ``finished_dq``;
    there and with a sink the sum of ds, which should be zero.
    """
    dq += product(ds.to(k.dtype), k, CONFIG)
    if k.dtype == tl.float32:
        pk += product(p, k, CONFIG)
    if k.dtype == tl.float32 or WITH_SINK:
        excess += tl.sum(ds, 1)
    return dq, pk, excess


@triton.jit
def finished_dq(
    dq, pk, excess, inverse_sum, delta, dlse, scale, delta_ptr, at, inside, dtype: tl.constexpr
):
    """dq from the sums over all keys. In fp32 delta was rowsum(do * o) alone: dq is corrected by
    its difference from rowsum(p * do v^T) - dlse, and the corrected delta is written.
    """
    if dtype != tl.float16:
        dq = dq * inverse_sum[:, None]
    if dtype == tl.float32:
        missing = excess * inverse_sum - dlse
        dq -= missing[:, None] * (pk * inverse_sum[:, None])
        tl.store(delta_ptr + at, delta + missing, mask=inside)
    return dq * scale


@triton.jit
def statistics_of(softmax_ptr, delta_ptr, batch, head, queries, heads, rows):
    """Where a head's statistics are, for ``load_queries``."""
    head_offset = (batch * heads + head).to(tl.int64) * queries
    return softmax_ptr + head_offset, softmax_ptr + rows + head_offset, delta_ptr + head_offset


@triton.jit
def load_queries(
    q_source, do_source, statistics, first, queries, MASKED: tl.constexpr, CONFIG: tl.constexpr
):
    """A tile of queries: q, do, the maximum, one over the sum, and delta."""
    m_ptr, inverse_sum_ptr, delta_ptr = statistics
    q = load_rows(q_source, first, queries, CONFIG.BLOCK_Q, MASKED, CONFIG)
    do = load_rows(do_source, first, queries, CONFIG.BLOCK_Q, MASKED, CONFIG, True)
    row = first + tl.arange(0, CONFIG.BLOCK_Q)
    if MASKED:
        # The probabilities of rows past the last are exp(-inf).
        m = tl.load(m_ptr + row, mask=row < queries, other=float("inf"))
        inverse_sum = tl.load(inverse_sum_ptr + row, mask=row < queries, other=0.0)
        delta = tl.load(delta_ptr + row, mask=row < queries, other=0.0)
    else:
        m = tl.load(m_ptr + row)
        inverse_sum = tl.load(inverse_sum_ptr + row)
        delta = tl.load(delta_ptr + row)
    return q, do, m, inverse_sum, delta


@triton.jit
def transposed_probabilities(k, q, m, inverse_sum, factor, CONFIG: tl.constexpr):
    """The probabilities of a tile, [keys, queries]: transposed, they and ds are the left operands
    of the products for dv and dk, and stay in registers.
    """
    p = tl.exp2(product(k, tl.trans(q), CONFIG) * factor - m[None, :])
    return p * inverse_sum[None, :]


@triton.jit
def add_queries(dk, dv, p, v, q, do, delta, CONFIG: tl.constexpr):
    """dk and dv, [keys, width], with the terms of a tile of queries."""
    dv += product(p.to(do.dtype), do, CONFIG)
    ds = p * (product(v, tl.trans(do), CONFIG) - delta[None, :])
    dk += product(ds.to(q.dtype), q, CONFIG)
    return dk, dv
