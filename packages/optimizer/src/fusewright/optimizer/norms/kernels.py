"""Kernels of the gradients' norm over many tensors, after the squares were added.

norm = sqrt(sum of partials)    g' = g min(1, max_norm / (norm + 1e-6))
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.tiles import elements_of, pointer, read, write
from ..common.tiles_step import root_of_sum


@triton.jit
def norm_kernel(partials, norm, partial_count, CONFIG: tl.constexpr):
    """The one program adds all partial sums and takes the root."""
    tl.store(norm, root_of_sum(partials, partial_count, CONFIG.SIZE).to(tl.float32))


@triton.jit
def clip_kernel(
    addresses,
    lengths,
    first,
    owner,
    partials,
    norm_out,
    max_norm,
    partial_count,
    blocks,
    CONFIG: tl.constexpr,
):
    """Each program adds all partial sums for itself, then scales in place blocks as far apart as
    there are programs.
    """
    program = tl.program_id(0)
    norm = root_of_sum(partials, partial_count, CONFIG.PARTIALS)
    if program == 0:
        tl.store(norm_out, norm.to(tl.float32))
    factor = (max_norm / (norm + 1e-6)).to(tl.float32)
    offsets = tl.arange(0, CONFIG.SIZE)
    # Where nothing is clipped nothing is read; a NaN is multiplied in.
    if ~(factor >= 1.0):
        for block in range(program, blocks, tl.num_programs(0)):
            tensor, start, length = elements_of(block, owner, first, lengths, CONFIG.SIZE)
            g = pointer(addresses, tensor, CONFIG.G, CONFIG.ALIGNED) + start
            if length >= CONFIG.SIZE:
                scale_elements(g, offsets, length, factor, True)
            else:
                scale_elements(g, offsets, length, factor, False)


@triton.jit
def scale_elements(g, offsets, length, factor, WHOLE: tl.constexpr):
    x = read(g, offsets, length, WHOLE).to(tl.float32) * factor
    write(g, offsets, length, x.to(g.dtype.element_ty), WHOLE)
