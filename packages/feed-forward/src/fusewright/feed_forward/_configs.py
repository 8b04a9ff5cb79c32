"""Launch tables as data: how much of a tensor one program takes.

Source: unmeasured.
"""

from __future__ import annotations

from typing import NamedTuple


class ElementsConfig(NamedTuple):
    """One program takes ``block`` consecutive elements of the result."""

    block: int
    num_warps: int


FORWARD = ElementsConfig(block=2048, num_warps=4)
BACKWARD = ElementsConfig(block=2048, num_warps=4)
