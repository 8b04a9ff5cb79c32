"""Device function of single-tile and streaming kernels: the softmax of scores with a mask."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import LOG2_E, LOWEST, product


@triton.jit
def masked_softmax(q, k, scale, first, length, CONFIG: tl.constexpr):
    """exp(s - m) of the keys before ``length``, s = scale q k^T, [queries, keys], with the row's
    maximum m in base 2 and the row's sum; without any score above -inf the maximum is LOWEST and
    the sum 0.
    """
    factor = scale * LOG2_E
    inside = first + tl.arange(0, CONFIG.BLOCK_K) < length
    s = tl.where(inside[None, :], product(q, tl.trans(k), CONFIG), float("-inf"))
    m = tl.max(s, 1) * factor
    m = tl.where(m == float("-inf"), LOWEST, m)
    # A multiply-add, rounded once, as in all kernels: otherwise the passes would not agree on p.
    p = tl.exp2(s * factor - m[:, None])
    return p, m, tl.sum(p, 1)
