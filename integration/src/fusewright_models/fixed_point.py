"""States of a reversible stack as whole numbers: sums of such are undone to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Sums of two numbers below it stay within int32.
LIMIT = 1 << 30
BITS_OF_BYTE = 8


class FixedPoint:
    """Numbers of 2^-F in int32, and the step of a midpoint stack on them.

    Args:
        fraction_bits: F.
        halves: the mean of the two states before is carried on, rather than the earlier.

    Raises:
        ValueError: no F from 1 to 29.
    """

    def __init__(self, fraction_bits: int, *, halves: bool) -> None:
        if not 1 <= fraction_bits <= 29:
            raise ValueError(f"fraction_bits must be from 1 to 29; got {fraction_bits}")
        self.one, self.halves = float(1 << fraction_bits), halves

    def rounded(self, x: Tensor) -> Tensor:
        """x in whole numbers; what has no place there, NaN too, is `outside`."""
        scaled = (x.to(wide(x.dtype)) * self.one).round_()
        scaled = torch.nan_to_num(scaled, nan=LIMIT, posinf=LIMIT, neginf=-LIMIT)
        return scaled.clamp_(-LIMIT, LIMIT).to(torch.int32)

    def floating(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        return state.to(dtype) * (1.0 / self.one)

    def outside(self, state: Tensor) -> Tensor:
        """Whether any number is at or beyond the ends of the range, 0-d bool."""
        return (state.abs() >= LIMIT).any()

    def advanced(
        self, before: Tensor, state: Tensor, kick: Tensor, *, first: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The state after ``state``, and the bits that halving drops."""
        if first or not self.halves:
            return (before + kick).clamp_(-LIMIT, LIMIT), None
        both = before + state
        return ((both >> 1) + kick).clamp_(-LIMIT, LIMIT), packed(both & 1)

    def undone(self, after: Tensor, state: Tensor, kick: Tensor, dropped: Tensor | None) -> Tensor:
        """The state before ``state``, whose step with ``kick`` led to ``after``."""
        if dropped is None:
            return after - kick
        return ((after - kick) << 1) + unpacked(dropped, state) - state

    def carried(self, before: Any, state: Any, *, first: bool) -> Any:
        """What a step adds its force to, in real numbers."""
        return 0.5 * (before + state) if self.halves and not first else before

    def straight(self, x: Tensor, state: Tensor) -> Tensor:
        """The numbers of ``state`` with the gradient of ``x``, which they round."""
        return Straight.apply(x, self.floating(state, wide(x.dtype)))


class Straight(torch.autograd.Function):
    """The second argument, with the first's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which states are shown to layers: fp32, of fp64 fp64."""
    return torch.promote_types(dtype, torch.float32)


def packed(bits: Tensor) -> Tensor:
    """Eight of them to a byte, ``[ceil(numbers / 8)]``."""
    flat = bits.reshape(-1)
    spare = -flat.numel() % BITS_OF_BYTE
    rows = torch.nn.functional.pad(flat, (0, spare)).view(-1, BITS_OF_BYTE)
    places = torch.arange(BITS_OF_BYTE, device=bits.device, dtype=bits.dtype)
    return (rows << places).sum(1).to(torch.uint8)


def unpacked(bytes_: Tensor, like: Tensor) -> Tensor:
    """The bits again, in the shape and dtype of ``like``."""
    places = torch.arange(BITS_OF_BYTE, device=like.device, dtype=like.dtype)
    bits = (bytes_.to(like.dtype)[:, None] >> places) & 1
    return bits.reshape(-1)[: like.numel()].view(like.shape)
