"""What rounding took from o, kept in four bits a number for the delta of a backward pass.

    o = round(o) + e u    e in [-1/2, 1/2], u the distance of two numbers of o's dtype there

e is kept as the nearest fifteenth: what is left of it is at most 1/30, and nothing where rounding
took nothing, as where one key has all the weight. Numbers are words of fp32, whose differences are
multiples of u / 2^16 in bf16 and of u / 2^13 in fp16; below fp16's normal numbers, where u is
greater, less is made good. Eight numbers are a word of 32 bits, the first in its lowest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .outputs import WORD
from .tiles import end_of

OF_WORD = tl.constexpr(WORD)
# So many steps are u, as a difference of words of fp32.
STEPS = tl.constexpr(15)
# The code of e = 0, and the word of numbers from which rounding took nothing.
MIDDLE = tl.constexpr(8)
NOTHING = tl.constexpr(-0x77777778)


@triton.jit
def nearest(o, dtype: tl.constexpr):
    """A tile of fp32 rounded to the nearest numbers of ``dtype``, also by the interpreter, which
    would cut bf16.
    """
    if dtype == tl.bfloat16:
        word = o.to(tl.int32, bitcast=True)
        rounded = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        o = tl.where(o == o, rounded, word).to(tl.float32, bitcast=True)
    return o.to(dtype)


@triton.jit
def packed_rounding(o, rounded):
    """The words of a tile of o in fp32, [rows, columns / 8], and of what it was rounded to."""
    STEP: tl.constexpr = (1 << (16 if rounded.dtype == tl.bfloat16 else 13)) // STEPS
    taken = o.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    # Within what 16 codes say, or a greater difference would pass 31 bits.
    taken = tl.minimum(tl.maximum(taken, -MIDDLE * STEP), (MIDDLE - 1) * STEP)
    code = (taken + (MIDDLE * STEP + STEP // 2)) // STEP
    at = 4 * tl.arange(0, OF_WORD)
    codes = code.reshape([o.shape[0], o.shape[1] // OF_WORD, OF_WORD])
    return tl.xor_sum(codes << at[None, None, :], 2)


@triton.jit
def unrounded(o, words, dtype: tl.constexpr):
    """A tile of o as it was before its rounding, as far as its words know: o in fp32, of ``dtype``,
    and words [rows, columns / 8].
    """
    STEP: tl.constexpr = (1 << (16 if dtype == tl.bfloat16 else 13)) // STEPS
    at = 4 * tl.arange(0, OF_WORD)
    code = (words[:, :, None] >> at[None, None, :]) & 15
    code = code.reshape([o.shape[0], o.shape[1]])
    return (o.to(tl.int32, bitcast=True) + (code - MIDDLE) * STEP).to(tl.float32, bitcast=True)


@triton.jit
def load_unrounded(
    o_ptr, o_low_ptr, place, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, limit=None
):
    """A tile of o, contiguous [B, rows, heads, D], in fp32, with what its words know of it; rows
    from ``limit`` on, or past the last, are 0.
    """
    batch, head, first, rows, heads = place
    row = tl.arange(0, ROWS)
    inside = (first + row < end_of(rows, limit))[:, None]
    # May need 64 bits.
    start = (batch.to(tl.int64) * rows + first) * heads + head
    col = tl.arange(0, BLOCK_D)
    at = start * D + row[:, None] * (heads * D) + col[None, :]
    o = tl.load(o_ptr + at, mask=inside & (col < D)[None, :], other=0.0)
    WORDS: tl.constexpr = D // OF_WORD
    word = tl.arange(0, BLOCK_D // OF_WORD)
    at_word = start * WORDS + row[:, None] * (heads * WORDS) + word[None, :]
    words = tl.load(o_low_ptr + at_word, mask=inside & (word < WORDS)[None, :], other=NOTHING)
    return unrounded(o.to(tl.float32), words, o_ptr.dtype.element_ty)
