"""Launch tables as data: how many elements one program takes, and with how many warps."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """One program takes ``size`` elements of one tensor."""

    size: int
    num_warps: int


class Walk(NamedTuple):
    """``programs_per_sm`` programs stay on each multiprocessor and walk over blocks of ``size``."""

    size: int
    num_warps: int
    programs_per_sm: int


ADAMW = Block(size=1024, num_warps=4)
SQUARES = Walk(size=4096, num_warps=8, programs_per_sm=4)
SCALE = Walk(size=4096, num_warps=8, programs_per_sm=4)
# Of the one program that prepares a step: so many tensors, or partial sums, at a time.
PREPARE = Block(size=512, num_warps=4)
# Of the elements of matrices that are orthogonalised; size is of a tile, many of which a program
# may take; unmeasured.
MATRICES = Block(size=1024, num_warps=4)
