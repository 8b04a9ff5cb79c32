"""What the kernels over many tensors share: which elements a program takes, and how they are read
and written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def elements_of(block, owner, first, lengths, SIZE: tl.constexpr):
    """Of a block: its tensor, its first element there, and how many it has from that one on."""
    tensor = tl.load(owner + block)
    start = (block - tl.load(first + tensor)).to(tl.int64) * SIZE
    return tensor, start, tl.load(lengths + tensor) - start


@triton.jit
def pointer(addresses, place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """To the memory whose address is at this place of the table."""
    found = tl.load(addresses + place).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def read(base, offsets, length, WHOLE: tl.constexpr):
    """Elements; of a whole block without a mask, which would split the accesses."""
    if WHOLE:
        found = tl.load(base + offsets)
    else:
        found = tl.load(base + offsets, mask=offsets < length, other=0)
    return found


@triton.jit
def write(base, offsets, length, values, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(base + offsets, values)
    else:
        tl.store(base + offsets, values, mask=offsets < length)


@triton.jit
def random_bits(seed, step, tensor, offsets):
    """32 bits for each element, the same for the same seed, step, tensor and element.

    Two rounds of a multiplicative hash: a tenth of what Philox takes, and what rounds a number up
    or down needs no more.
    """
    x = offsets.to(tl.uint32) * 0x9E3779B9 + tensor.to(tl.uint32) * 0x85EBCA6B
    x = scrambled(x ^ (seed.to(tl.uint32) + step.to(tl.uint32) * 0xC2B2AE35))
    return scrambled(x + (offsets >> 32).to(tl.uint32) + 0x27D4EB2F)


@triton.jit
def scrambled(x):
    x ^= x >> 16
    x = (x * 0x7FEB352D).to(tl.uint32)
    x ^= x >> 15
    x = (x * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def rounded_by_chance(x, bits):
    """fp32 numbers that bf16 holds, up or down with chances that make x the mean."""
    raw = x.to(tl.uint32, bitcast=True)
    up = ((raw + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # What is not finite has no neighbours.
    return tl.where(tl.abs(x) < float("inf"), up, x)
