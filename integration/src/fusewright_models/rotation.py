"""Rotary positions: pairs of columns of queries and keys, turned by an angle for each position.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """What turns queries and keys, ``[T, 2, 1, D]``; values, the second of two, stay as they are.

    Attributes:
        cos: what an element is multiplied by.
        sin: what its partner is, half a row further on.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Rotation:
        """For ``positions [T]``: pair i of D / 2 turns by position / base^(2 i / D)."""
        # In fp64, since the angle of a late position is a large number.
        steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
        angles = positions.double().unsqueeze(-1) * base ** (-steps / width)
        angles = torch.cat([-angles, angles], -1).unsqueeze(1)
        turned = torch.stack([angles, torch.zeros_like(angles)], 1)
        return cls(turned.cos().to(dtype), turned.sin().to(dtype))

    def of(self, rows: Tensor) -> Tensor:
        """``rows [B, T, 1 or 2, H, D]``, queries alone or keys and values, turned."""
        kinds = rows.shape[2]
        return _Turned.apply(rows, self.cos[:, :kinds], self.sin[:, :kinds], 1)

    def split(self, sizes: list[int]) -> list[Rotation]:
        """Of as many tokens each."""
        return [Rotation(*parts) for parts in zip(*(x.split(sizes) for x in self), strict=True)]


class _Turned(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, which autograd would make of its parts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
        partners = rows.roll(rows.shape[-1] // 2, -1)
        return torch.addcmul(rows * cos, partners, sin, value=way).to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.way = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Turned.apply(*grads, *ctx.saved_tensors, -ctx.way), None, None, None
