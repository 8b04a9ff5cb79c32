"""Device functions of all kernels over many tensors: which elements a program takes, and how they
are read and written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def elements_of(block, owner, first, lengths, SIZE: tl.constexpr):
    """Of a block: its tensor, its first element there, and how many elements follow from it."""
    tensor = tl.load(owner + block)
    start = (block - tl.load(first + tensor)).to(tl.int64) * SIZE
    return tensor, start, tl.load(lengths + tensor) - start


@triton.jit
def pointer(addresses, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """To the memory whose address is at this place of the table."""
    base = tl.load(addresses + place).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(base, 16) if ALIGNED else base


@triton.jit
def read(base, offsets, length, WHOLE: tl.constexpr):
    """Elements; of a whole block without a mask, which would split the accesses."""
    if WHOLE:
        x = tl.load(base + offsets)
    else:
        x = tl.load(base + offsets, mask=offsets < length, other=0)
    return x


@triton.jit
def write(base, offsets, length, values, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(base + offsets, values)
    else:
        tl.store(base + offsets, values, mask=offsets < length)
