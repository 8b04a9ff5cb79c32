"""Device functions of all kernels over many tensors: which elements a program takes, and how they
are read and written.

``CONFIG`` is the record of a launch's constants, which ``common.launch.planned`` makes.
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


@triton.jit
def squares_of(
    addresses, blocks, start, stop, SPREAD: tl.constexpr, DTYPE: tl.constexpr, CONFIG: tl.constexpr
):
    """The sum of the squares of the blocks from ``start`` to ``stop``, with ``SPREAD`` of those as
    far apart as there are programs, in fp64, in which no square overflows or vanishes; ``blocks``
    are the tables that ``elements_of`` takes.
    """
    SIZE: tl.constexpr = CONFIG.SIZE
    owner, first, lengths = blocks
    offsets = tl.arange(0, SIZE)
    squares = tl.zeros((SIZE,), tl.float64)
    for block in range(start, stop, tl.num_programs(0) if SPREAD else 1):
        tensor, begin, length = elements_of(block, owner, first, lengths, SIZE)
        base = pointer(addresses, tensor, DTYPE, CONFIG.ALIGNED) + begin
        if length >= SIZE:
            x = read(base, offsets, length, True).to(tl.float64)
        else:
            x = read(base, offsets, length, False).to(tl.float64)
        squares += x * x
    return tl.sum(squares, 0)
