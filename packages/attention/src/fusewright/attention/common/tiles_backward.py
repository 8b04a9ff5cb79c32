"""Device functions of backward passes over many keys.

    p = exp(s - m) / l,  ds = p * (do v^T - delta),  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

The probabilities are recomputed, from the scores and from the maximum m of each row and the
inverse 1 / l of its sum, as the forward pass had them: the rounding of a log-sum-exp would make the
probability of a great score wrong. delta takes o as it was before its rounding, from o and o_low:
where one key has nearly all the weight, do v^T - delta is a small difference. In fp32 even that is
not enough: two sums of the same products, do v^T and do o, are rounded differently. There delta
becomes rowsum(p * do v^T), computed while the keys pass, and dq is corrected for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._core.tiles import product_in_order
from .tiles import load_rows


@triton.jit
def load_statistics(
    do,
    o_ptr,
    o_low_ptr,
    dlse_ptr,
    softmax_ptr,
    delta_ptr,
    batch,
    head,
    first,
    queries,
    heads,
    rows,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_O_LOW: tl.constexpr,
):
    """The maximum, one over the sum, delta and dlse of a tile of queries, [BLOCK_Q] each; the
    offsets of the rows, and which are inside. delta is written too, except in fp32, where
    ``finished_dq`` has yet to subtract dlse and to correct it.
    """
    # May need 64 bits.
    task_stride = tl.cast(queries, tl.int64) * heads * D
    o_source = o_ptr, task_stride, heads * D, D, batch, head, queries
    o = load_rows(o_source, first, queries, BLOCK_Q, True, D, BLOCK_D, False).to(tl.float32)
    if HAS_O_LOW:
        o_low_source = o_low_ptr, task_stride, heads * D, D, batch, head, queries
        o += load_rows(o_low_source, first, queries, BLOCK_Q, True, D, BLOCK_D, False)
    row = first + tl.arange(0, BLOCK_Q)
    at = (batch * heads + head).to(tl.int64) * queries + row
    inside = row < queries
    delta = tl.sum(do.to(tl.float32) * o, 1)
    dlse = tl.zeros([BLOCK_Q], tl.float32)
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if do.dtype != tl.float32:
        delta -= dlse
        tl.store(delta_ptr + at, delta, mask=inside)
    m = tl.load(softmax_ptr + at, mask=inside, other=0.0)
    inverse_sum = tl.load(softmax_ptr + rows + at, mask=inside, other=0.0)
    return m, inverse_sum, delta, dlse, at, inside


@triton.jit
def score_gradients(
    q, k, v, do, m, inverse_sum, delta, factor, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):
    """p and ds of a tile of scores, [queries, keys], not yet divided by the row's sum; ds of fp16,
    whose range it might leave, already is.
    """
    p = tl.exp2(product_in_order(q, tl.trans(k), UPCAST, PRECISION) * factor - m[:, None])
    ds = p * (product_in_order(do, tl.trans(v), UPCAST, PRECISION) - delta[:, None])
    if q.dtype == tl.float16:
        ds = ds * inverse_sum[:, None]
    return p, ds


@triton.jit
def add_keys(dq, pk, excess, p, ds, k, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """dq [queries, D] with the terms of a tile of keys; in fp32 also sum(p k), and the sum of ds,
    which should be zero, for ``finished_dq``.
    """
    dq += product_in_order(ds.to(k.dtype), k, UPCAST, PRECISION)
    if k.dtype == tl.float32:
        pk += product_in_order(p, k, UPCAST, PRECISION)
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
def load_queries(
    q_source,
    do_source,
    m_ptr,
    inverse_sum_ptr,
    delta_ptr,
    first,
    queries,
    BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """A tile of queries: q, do, the maximum, one over the sum, and delta."""
    q = load_rows(q_source, first, queries, BLOCK_Q, MASKED, D, BLOCK_D, DESCRIPTORS)
    do = load_rows(do_source, first, queries, BLOCK_Q, MASKED, D, BLOCK_D, DESCRIPTORS)
    row = first + tl.arange(0, BLOCK_Q)
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
def transposed_probabilities(
    k, q, m, inverse_sum, factor, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):
    """The probabilities of a tile, [keys, queries]: transposed, they and ds are the left operands
    of the products for dv and dk, and stay in registers.
    """
    p = tl.exp2(product_in_order(k, tl.trans(q), UPCAST, PRECISION) * factor - m[None, :])
    return p * inverse_sum[None, :]


@triton.jit
def add_queries(dk, dv, p, v, q, do, delta, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv, [keys, D], with the terms of a tile of queries."""
    dv += product_in_order(p.to(do.dtype), do, UPCAST, PRECISION)
    ds = p * (product_in_order(v, tl.trans(do), UPCAST, PRECISION) - delta[None, :])
    dk += product_in_order(ds.to(q.dtype), q, UPCAST, PRECISION)
    return dk, dv
