"""Launch tables as data: how much of a tensor one program takes.

Source: results/tuning-h200-torch2.11-triton3.6.csv, where a quarter to twice as many elements take
as long from 8192 rows of 4096 on, and up to an eighth less at 1024 rows of 1024.
"""

from __future__ import annotations

from typing import NamedTuple


class ElementsConfig(NamedTuple):
    """One program takes ``block`` consecutive elements of the result."""

    block: int
    num_warps: int


FORWARD = ElementsConfig(block=2048, num_warps=4)
BACKWARD = ElementsConfig(block=2048, num_warps=4)
