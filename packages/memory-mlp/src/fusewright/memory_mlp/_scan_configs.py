"""Launch tables of the scan as data: how much of the hidden layer a program takes at a time.

Source: docs/decisions/0005-memory-scan-h200.csv.
"""

from __future__ import annotations

from typing import NamedTuple


class ScanConfig(NamedTuple):
    """A program takes a chunk of tokens and ``block_h`` hidden units. Where it ``meets``, a head's
    other units are with other programs; elsewhere it takes them one block after the other.
    """

    block_h: int
    num_warps: int
    meets: bool = False


# From the line of the most programs to that of the fewest.
STATES = (ScanConfig(block_h=32, num_warps=4, meets=True),)
STATES_BACKWARD = (
    ScanConfig(block_h=16, num_warps=4, meets=True),
    ScanConfig(block_h=32, num_warps=4, meets=True),
)
READ = ScanConfig(block_h=64, num_warps=4)
COMPUTE_AGAIN = ScanConfig(block_h=64, num_warps=4)
READ_BACKWARD = ScanConfig(block_h=64, num_warps=4)
KEYS_BACKWARD = ScanConfig(block_h=64, num_warps=4)
