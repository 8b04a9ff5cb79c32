"""Device functions of forward passes over many keys: the online softmax, and what is stored.

    m' = max(m, max_j s_j)    l' = l exp(m - m') + sum_j exp(s_j - m')
    o' = o exp(m - m') + sum_j exp(s_j - m') v_j

Milakov and Gimelshein, arXiv 1805.02867; Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2_E, LOG_2, end_of, store_rows
from .tiles_rounding import OF_WORD, nearest, packed_rounding


@triton.jit
def next_softmax(s, m, l, factor):
    """exp(s - m) of the next tile of scores [queries, keys], the maximum m and the sum l of the
    rows with it, and the factor that rescales the sums before it.
    """
    m_next = tl.maximum(m, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - m_next[:, None])
    rescale = tl.exp2(m - m_next)
    return p, m_next, l * rescale + tl.sum(p, 1), rescale


@triton.jit
def sink_of(sinks_ptr, head):
    """The sink of a head, in base 2."""
    return tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E


@triton.jit
def add_sink(x, m, l, sink):
    """x, probabilities or their sums of values, [queries, ...], the maximum and the sum of the rows
    with one score more, a sink in base 2, which has no value.
    """
    m_next = tl.maximum(m, sink)
    rescale = tl.exp2(m - m_next)
    return x * rescale[:, None], m_next, l * rescale + tl.exp2(sink - m_next)


@triton.jit
def store_outputs(
    o, m, l, o_ptr, lse_ptr, softmax_ptr, o_low_ptr, place, rows, D: tl.constexpr, limit=None
):
    """Divide o by its row's sum and write it, and those statistics that are asked for; of the rows
    before ``limit``, or of all that there are.
    """
    batch, head, first, queries, heads = place
    row = first + tl.arange(0, o.shape[0])
    at = (batch * heads + head).to(tl.int64) * queries + row
    inside = row < end_of(queries, limit)
    # Only a row without keys has a sum of zero, and none with a finite sink.
    inverse_sum = 1.0 / tl.where(l == 0.0, 1.0, l)
    if softmax_ptr is not None:
        tl.store(softmax_ptr + at, m, mask=inside)
        tl.store(softmax_ptr + rows + at, inverse_sum, mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + at, (m + tl.log2(l)) * LOG_2, mask=inside)
    o = o * inverse_sum[:, None]
    if o_low_ptr is not None:
        rounded = nearest(o, o_ptr.dtype.element_ty)
        store_rows(o_low_ptr, packed_rounding(o, rounded), place, D // OF_WORD, limit)
        store_rows(o_ptr, rounded, place, D, limit)
    else:
        store_rows(o_ptr, o, place, D, limit)
