"""AdamW in plain torch, one parameter after the other, without asking the device for anything.

With g the gradient, unscaled, clipped and of the right sign, t the count of steps taken:

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2    v^ = max(v^, v') for amsgrad
    p' = (1 - lr wd) p - lr / (1 - beta1^t) m' / (sqrt(v^ / (1 - beta2^t)) + eps)

wd p is added to g instead where decay is not decoupled. Kingma and Ba, Adam, arXiv 1412.6980;
Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._members import Member, Part, Rules, Step, group_numbers

Tensor = torch.Tensor
# What bits of a random number round p, exp_avg and exp_avg_sq.
SHIFTS = 0, 16, 8
LOW_32 = 0xFFFFFFFF


class ReferencePart(Part):
    """The members on one device that plain torch serves."""

    numbers: Sequence[float | Tensor] = ()

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        self.gradients = gradients
        self.point_numbers(groups)

    def point_numbers(self, groups: list[dict]) -> None:
        self.numbers = group_numbers(groups, self.device)

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Of each gradient, by the mesh that it is of."""
        return [
            (member.mesh, g.double().square().sum().view(1))
            for member, g in zip(self.members, self.gradients, strict=True)
        ]

    def move(self, step: Step) -> None:
        """Take the step, if it is to be taken."""
        factor = decide(step, self.rules.max_grad_norm, self.device)
        for number, (member, g) in enumerate(zip(self.members, self.gradients, strict=True)):
            numbers = self.numbers[5 * member.group : 5 * member.group + 5]
            move(member, g, numbers, factor, step.skipped, self.rules, number)


def decide(step: Step, max_grad_norm: float | None, device: torch.device) -> Tensor:
    """Write norm and skipped; return what gradients are multiplied by, in fp64."""
    factor = torch.ones((), dtype=torch.float64, device=device)
    skips = torch.zeros((), dtype=torch.bool, device=device)
    if step.grad_scale is not None:
        factor = factor / step.grad_scale.double()
    if step.found_inf is not None:
        skips = skips | (step.found_inf.reshape(()) > 0.0)
    if step.squares is not None:
        norm = step.squares.sum().sqrt() * factor.abs()
        step.norm.copy_(norm)
        # False for NaN too.
        skips = skips | ~(norm < torch.inf)
        if max_grad_norm is not None:
            factor = factor * (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    step.skipped.copy_(skips)
    step.skipped_count.add_(skips)
    return factor.reshape(())


def move(
    member: Member,
    gradient: Tensor,
    numbers: Sequence[float | Tensor],
    factor: Tensor,
    skipped: Tensor,
    rules: Rules,
    number: int,
) -> None:
    """Move one parameter and its state, in place; in fp64 where it is of fp64, else in fp32."""
    lr, beta1, beta2, eps, weight_decay = (
        x.double().reshape(()) if isinstance(x, Tensor) else x for x in numbers
    )
    m_kept, v_kept, most_kept, low_kept = member.buffers
    assert m_kept is not None
    assert v_kept is not None
    dtype = torch.float64 if member.p.dtype == torch.float64 else torch.float32
    p, m, v = (x.to(dtype) for x in (member.p, m_kept, v_kept))
    g = gradient.to(dtype) * (factor * member.sign).to(dtype)
    if low_kept is not None:
        p = (p.view(torch.int32) + low_kept.to(torch.int32)).view(torch.float32)
    t = (member.step + 1.0).double()

    def rounded(x: float | Tensor) -> float | Tensor:
        return x.to(dtype) if isinstance(x, Tensor) else x

    if rules.decoupled:
        p = p * rounded(1.0 - lr * weight_decay)
    else:
        g = g + rounded(weight_decay) * p
    m = m + rounded(1.0 - beta1) * (g - m)
    v = rounded(beta2) * v + rounded(1.0 - beta2) * g * g
    bound = v if most_kept is None else torch.maximum(most_kept.to(dtype), v)
    root = bound.sqrt() * rounded((1.0 - beta2**t).rsqrt()) + rounded(eps)
    p = p - rounded(lr / (1.0 - beta1**t)) * (m / root)

    def keep(kept: Tensor, x: Tensor, shift: int) -> None:
        if rules.rounding == "stochastic" and kept.dtype == torch.bfloat16:
            bits = random_bits(rules.seed, t, number, x.shape, x.device) >> shift
            x = rounded_by_chance(x, bits)
        kept.copy_(torch.where(skipped, kept, x.to(kept.dtype)))

    keep(m_kept, m, SHIFTS[1])
    keep(v_kept, v, SHIFTS[2])
    if most_kept is not None:
        keep(most_kept, bound, SHIFTS[2])
    if low_kept is not None:
        # NaN has no neighbours: rounded up, its bits would be those of zero.
        whole = torch.where(p.isnan(), torch.nan, p).view(torch.int32)
        high = torch.where(p.isnan(), whole, (whole + 0x8000) & -0x10000)
        keep(low_kept, (whole - high).to(torch.int16), 0)
        p = high.view(torch.float32)
    keep(member.p, p, SHIFTS[0])
    member.step.add_(~skipped)


def random_bits(
    seed: int, step: Tensor, number: int, shape: torch.Size, device: torch.device
) -> Tensor:
    """32 bits for each element, the same for the same seed, step, parameter and element."""
    x = torch.arange(shape.numel(), device=device).view(shape)
    low, high = x & LOW_32, x >> 32
    start = (low * 0x9E3779B9 + number * 0x85EBCA6B) & LOW_32
    key = (seed + step.long() * 0xC2B2AE35) & LOW_32
    return scrambled((scrambled(start ^ key) + high + 0x27D4EB2F) & LOW_32)


def scrambled(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = times(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = times(x, 0x846CA68B)
    return x ^ (x >> 16)


def times(x: Tensor, factor: int) -> Tensor:
    """The low 32 bits of a product of two such numbers, within 63 bits all the way."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * (factor & 0xFFFF)) << 16)) & LOW_32


def rounded_by_chance(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 numbers that bf16 holds, up or down with chances that make x the mean."""
    raw = x.view(torch.int32).long() & LOW_32
    up = (raw + (bits & 0xFFFF)) & 0xFFFF0000
    up = torch.where(up >= 1 << 31, up - (1 << 32), up).to(torch.int32).view(torch.float32)
    # What is not finite has no neighbours.
    return torch.where(x.abs() < torch.inf, up, x)
