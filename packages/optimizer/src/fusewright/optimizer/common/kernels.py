"""The kernel that adds the squares of many tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import elements_of, pointer, read


@triton.jit
def squares_kernel(
    addresses,
    lengths,
    first,
    owner,
    partials,
    blocks,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program adds the squares of blocks as far apart as there are programs, in fp64, in which
    no square overflows or vanishes.
    """
    program = tl.program_id(0)
    offsets = tl.arange(0, SIZE)
    squares = tl.zeros((SIZE,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        tensor, start, length = elements_of(block, owner, first, lengths, SIZE)
        g = pointer(addresses, tensor, G, ALIGNED) + start
        if length >= SIZE:
            x = read(g, offsets, length, True).to(tl.float64)
        else:
            x = read(g, offsets, length, False).to(tl.float64)
        squares += x * x
    tl.store(partials + program, tl.sum(squares, 0))
