"""Launch tables of what stands before and behind the memory as data: how much one program takes.

Source: unmeasured, a first guess.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class InputTile(NamedTuple):
    """One program takes whole rows of a head, as many as have ``size`` bytes together."""

    size: int
    num_warps: int

    def rows(self, columns: int, dtype: torch.dtype) -> int:
        """Of ``columns`` numbers each, a power of two; at least one row."""
        return max(1, self.size // (columns * dtype.itemsize))


class ChannelTile(NamedTuple):
    """One program takes ``rows`` tokens and ``columns`` channels; those that add up the shares of
    the taps' gradient take ``parts`` shares of ``part_columns`` numbers at a time.
    """

    rows: int
    columns: int
    parts: int
    part_columns: int
    num_warps: int


FORWARD = InputTile(size=2048, num_warps=4)
BACKWARD = InputTile(size=4096, num_warps=8)
JOINT_GRADIENT = ChannelTile(rows=16, columns=128, parts=64, part_columns=32, num_warps=4)
# The rows are those of x, as wide as the layer.
TOKENS = InputTile(size=8192, num_warps=8)
