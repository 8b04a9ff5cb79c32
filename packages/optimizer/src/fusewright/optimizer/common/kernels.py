"""The kernel that adds the squares of many tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import squares_of


@triton.jit
def squares_kernel(addresses, lengths, first, owner, partials, blocks, CONFIG: tl.constexpr):
    """One program adds the squares of blocks as far apart as there are programs."""
    program, tables = tl.program_id(0), (owner, first, lengths)
    total = squares_of(addresses, tables, program, blocks, True, CONFIG.G, CONFIG)
    tl.store(partials + program, total)
