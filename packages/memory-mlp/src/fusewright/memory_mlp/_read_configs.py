"""Launch tables of the read as data: how many tokens and hidden units a program takes at a time.

Source: results/tuning-read-h200-torch2.11-triton3.6.csv for the forward line of 16-bit numbers; the
others are unmeasured.
"""

from __future__ import annotations

from typing import NamedTuple


class ReadTile(NamedTuple):
    """For products in a ``precision``: a program takes ``tokens`` tokens and all hidden units,
    ``block_h`` after ``block_h``. A ``hopper`` line is for compute capability 9.0 alone.
    """

    precision: str
    tokens: int
    block_h: int
    num_warps: int
    hopper: bool = False


class ReadBackwardTile(NamedTuple):
    """A program that finds the queries' gradient takes what one of the forward pass takes; one that
    finds the weights' takes ``units`` hidden units and as many tokens as there are, ``tokens``
    after ``tokens``, of which ``num_stages`` are on their way at once.

    Where that is fewer than ``fills`` programs for each multiprocessor, several share the tokens of
    a head, none of them fewer than ``split_tokens``, and a second launch adds what they find.
    """

    precision: str
    tokens: int
    block_h: int
    units: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    split_tokens: int = 512
    fills: int = 2


class SumTile(NamedTuple):
    """A program adds the shares of ``block`` numbers."""

    block: int
    num_warps: int


# Where an fp32 product is three of TF32 parts, the parts of both operands would fill the registers
# of larger tiles; on Hopper, fewer than four warps may take tiles of fewer than 64 rows.
FORWARD = (
    ReadTile("narrow", tokens=64, block_h=128, num_warps=4),
    ReadTile("tf32", tokens=64, block_h=64, num_warps=8),
    ReadTile("tf32x3", tokens=16, block_h=32, num_warps=2),
)
# Hopper's products take operands from shared memory, and leave registers for more tokens.
BACKWARD = (
    ReadBackwardTile("narrow", 64, 64, units=16, num_warps=4, num_stages=2, hopper=True),
    ReadBackwardTile("narrow", 32, 64, units=16, num_warps=4, num_stages=2),
    ReadBackwardTile("tf32", tokens=16, block_h=32, units=16, num_warps=2, num_stages=1),
    ReadBackwardTile("tf32x3", 16, 32, units=16, num_warps=2, num_stages=1, hopper=True),
    ReadBackwardTile("tf32x3", 16, 32, units=16, num_warps=4, num_stages=1),
)
SUM = SumTile(block=512, num_warps=4)
