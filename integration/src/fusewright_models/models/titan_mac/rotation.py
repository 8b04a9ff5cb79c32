"""Rotary positions of a model: the angle of each token and pair of columns.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fusewright.attention import rotary
from torch import Tensor


class Rotation(NamedTuple):
    """What turns queries and keys, ``[T, D / 2]``.

    Attributes:
        cos: of the angles.
        sin: of the angles.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Rotation:
        """For ``positions [T]``: pair i of D / 2 turns by position / base^(2 i / D)."""
        # In fp64, since the angle of a late position is a large number.
        steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
        angles = positions.double().unsqueeze(-1) * base ** (-steps / width)
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    def of(self, rows: Tensor, **options: Any) -> Tensor:
        """``rows [B, T, 1 or 2, H, D]``, queries alone or keys and values, rotated; the options
        are those of ``rotary``.
        """
        return rotary(rows, self.cos, self.sin, **options)

    def split(self, sizes: list[int]) -> list[Rotation]:
        """Of as many tokens each."""
        return [Rotation(*parts) for parts in zip(*(x.split(sizes) for x in self), strict=True)]
