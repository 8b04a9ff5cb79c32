"""Rotary positions: each pair of columns (i, i + D / 2) of a row is rotated by position /
base^(2i/D), so that a product of two rows depends on their distance alone.

The gradient of a rotation is the rotation back: one node of autograd, where each product and each
sum would be one.

Su et al., RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.registration import apply

Tensor = torch.Tensor


def rotated(positions: Tensor, base: float, *rows: Tensor) -> list[Tensor]:
    """Each of the rows ``[B, T, H, D]``, of one dtype and width, in it, at ``positions`` ``[T]`` or
    ``[B, T]``; computed in fp32 (fp64 for fp64 rows), and the angles in fp64.
    """
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    width = rows[0].shape[-1]
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = (positions.double().unsqueeze(-1) * base**-steps).unsqueeze(-2)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    if torch.compiler.is_compiling():
        # Dynamo follows no function that has a jvp, and fuses the formula by itself.
        return [Rotation.forward(x, cos, sin) for x in rows]
    return [apply(Rotation, x, cos, sin) for x in rows]


class Rotation(torch.autograd.Function):
    """Rows rotated by the angles of cosines and sines ``[.., T, 1, D / 2]``, which get no
    gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, y = rows.to(cos.dtype).chunk(2, -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return apply(Rotation, *gradients, cos, -sin), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Rotation.apply(tangent, *ctx.saved_tensors)
