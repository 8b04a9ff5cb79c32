"""States of a reversible stack as whole numbers: sums of such are undone to the bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fusewright.norm import Backend
from torch import Tensor

from .devices import takes_launches

# Sums of two numbers below it stay within int32.
LIMIT = 1 << 30
BITS_OF_BYTE = 8


class Stepped(NamedTuple):
    """What a step leads to.

    Attributes:
        state: the next one.
        shown: as it is shown to a layer.
        dropped: the bits that halving drops, eight to a byte, where it does.
    """

    state: Tensor
    shown: Tensor
    dropped: Tensor | None


class FixedPoint:
    """Numbers of 2^-F in int32, and the step of a midpoint stack on them: on a GPU one launch.

    Args:
        fraction_bits: F.
        halves: the mean of the two states before is carried on, rather than the earlier.
        backend: "auto", "triton" or "reference"; all have the same states to the bit.

    Raises:
        ValueError: no F from 1 to 29.
    """

    def __init__(self, fraction_bits: int, *, halves: bool, backend: Backend = "auto") -> None:
        if not 1 <= fraction_bits <= 29:
            raise ValueError(f"fraction_bits must be from 1 to 29; got {fraction_bits}")
        self.one, self.halves, self.backend = float(1 << fraction_bits), halves, backend

    def start(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The state of x, twice, and whether it is out of range, 0-d bool."""
        # States follow one another in memory as they stand: all are laid out like the first.
        state = self.rounded(x.detach()).contiguous()
        return state, state, self.outside(state)

    def step(
        self,
        before: Tensor,
        state: Tensor,
        delta: Tensor,
        gain: float,
        saturated: Tensor,
        *,
        first: bool,
    ) -> Stepped:
        """From the states ``before`` and ``state`` on by ``gain`` times ``delta``, in the dtype
        that states are shown in. Sets ``saturated``, 0-d bool, where that leaves the range.
        """
        both = self.halves and not first
        if self._kernels_serve(delta):
            from ._fixed_point_kernels import advance

            with torch.cuda.device_of(delta):
                earlier = state if both else None
                return Stepped(
                    *advance(before, earlier, delta.contiguous(), gain, self.one, saturated)
                )
        kick = self.rounded(gain * delta)
        new, dropped = self.advanced(before, state, kick, first=first)
        saturated |= self.outside(kick) | self.outside(new)
        return Stepped(new, self.floating(new, delta.dtype), dropped)

    def step_back(
        self, after: Tensor, state: Tensor, delta: Tensor, gain: float, dropped: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The state before ``state``, whose step by ``gain`` times ``delta`` led to ``after``, and
        as it is shown.
        """
        if self._kernels_serve(delta):
            from ._fixed_point_kernels import undo

            with torch.cuda.device_of(delta):
                later = None if dropped is None else state
                return undo(after, later, delta.contiguous(), gain, self.one, dropped)
        before = self.undone(after, state, self.rounded(gain * delta), dropped)
        return before, self.floating(before, delta.dtype)

    def _kernels_serve(self, delta: Tensor) -> bool:
        """Whether a launch of ours may take it."""
        return (
            self.backend != "reference"
            and (delta.is_cuda or self.backend == "triton")
            and delta.dtype == torch.float32
            and delta.numel() > 0
            and takes_launches(delta)
        )

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


class Straight(torch.autograd.Function):
    """The second argument, what the first is rounded to, with the first's gradient."""

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
