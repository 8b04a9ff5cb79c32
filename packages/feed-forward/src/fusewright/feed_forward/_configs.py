"""Launch tables as data: how much of a tensor one program takes.

Source: results/tuning-h200-torch2.11-triton3.6.csv: at every size within 1.3 % of the fastest line.
"""

from __future__ import annotations

from typing import NamedTuple


class ElementsConfig(NamedTuple):
    """One program takes ``block`` consecutive elements of the result."""

    block: int
    num_warps: int


FORWARD = ElementsConfig(block=1024, num_warps=4)
BACKWARD = ElementsConfig(block=1024, num_warps=8)
