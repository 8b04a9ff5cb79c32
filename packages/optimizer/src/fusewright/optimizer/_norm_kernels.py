"""Kernels of the gradients' norm over many tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from ._elements import elements_of, pointer, read, write


@triton.jit
def _squares_kernel(
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
    """One program adds the squares of every so many-th block, in fp64: no square is too large or
    too small for it.
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


@triton.jit
def _norm_kernel(partials, norm, partial_count, SIZE: tl.constexpr):
    """The one program adds all shares and takes the root."""
    tl.store(norm, root_of_sum(partials, partial_count, SIZE).to(tl.float32))


@triton.jit
def root_of_sum(partials, partial_count, SIZE: tl.constexpr):
    """In fp64, in a fixed order."""
    lanes = tl.arange(0, SIZE)
    squares = tl.zeros((SIZE,), tl.float64)
    for start in range(0, partial_count, SIZE):
        at = start + lanes
        squares += tl.load(partials + at, mask=at < partial_count, other=0.0)
    return tl.sqrt(tl.sum(squares, 0))


@triton.jit
def _clip_kernel(
    addresses,
    lengths,
    first,
    owner,
    partials,
    norm_out,
    most,
    partial_count,
    blocks,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    SHARES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Every program adds all shares for itself, then scales every so many-th block by min(1, most /
    (norm + 1e-6)), in place.
    """
    program = tl.program_id(0)
    norm = root_of_sum(partials, partial_count, SHARES)
    if program == 0:
        tl.store(norm_out, norm.to(tl.float32))
    factor = (most / (norm + 1e-6)).to(tl.float32)
    offsets = tl.arange(0, SIZE)
    # Where nothing is clipped nothing is read; NaN is no such case.
    if ~(factor >= 1.0):
        for block in range(program, blocks, tl.num_programs(0)):
            tensor, start, length = elements_of(block, owner, first, lengths, SIZE)
            g = pointer(addresses, tensor, G, ALIGNED) + start
            if length >= SIZE:
                scale_elements(g, offsets, length, factor, True)
            else:
                scale_elements(g, offsets, length, factor, False)


@triton.jit
def scale_elements(g, offsets, length, factor, WHOLE: tl.constexpr):
    x = read(g, offsets, length, WHOLE).to(tl.float32) * factor
    write(g, offsets, length, x.to(g.dtype.element_ty), WHOLE)
