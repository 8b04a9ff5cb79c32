"""Launch tables as data: how much of a tensor one program takes.

Source: unmeasured.
"""

from __future__ import annotations

from typing import NamedTuple


class ScaleConfig(NamedTuple):
    """One program takes ``block`` consecutive elements."""

    block: int
    num_warps: int


SCALE = ScaleConfig(block=1024, num_warps=4)
