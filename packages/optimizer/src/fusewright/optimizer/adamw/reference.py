"""AdamW in plain torch, one parameter after the other, without a host synchronisation.

With g the gradient, unscaled, clipped and of the right sign, t the count of steps taken:

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2    v^ = max(v^, v') for amsgrad
    p' = (1 - lr wd) p - lr / (1 - beta1^t) m' / (sqrt(v^ / (1 - beta2^t)) + eps)

wd p is added to g instead where decay is not decoupled. Kingma and Ba, Adam, arXiv 1412.6980;
Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core.precision import wide_dtype
from ..common.reference import adamw_root, decide, in_fp64, rounded
from ..common.step import Part, Step
from .members import Member, Rules, group_numbers

Tensor = torch.Tensor
# Which bits of a random number round p, exp_avg and exp_avg_sq.
SHIFTS = 0, 16, 8
LOW_32 = 0xFFFFFFFF


class ReferencePart(Part):
    """The members on one device that plain torch serves."""

    numbers: Sequence[float | Tensor] = ()

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Take a step's gradients, in the members' order, and the groups' numbers."""
        self.gradients, self.numbers = gradients, group_numbers(groups, self.device)

    def point_numbers(self, groups: list[dict]) -> None:
        self.numbers = group_numbers(groups, self.device)

    def move(self, step: Step) -> None:
        """Take the step, unless it is skipped."""
        factor = decide(step, self.rules.max_grad_norm, self.device)
        for number, (member, g) in enumerate(zip(self.members, self.gradients, strict=True)):
            numbers = self.numbers[5 * member.group : 5 * member.group + 5]
            move(member, g, numbers, factor, step.skipped, self.rules, number)


def move(
    member: Member,
    gradient: Tensor,
    numbers: Sequence[float | Tensor],
    factor: Tensor,
    skipped: Tensor,
    rules: Rules,
    number: int,
) -> None:
    """Update one parameter and its state in place; in fp64 for an fp64 parameter, else in fp32."""
    lr, beta1, beta2, eps, weight_decay = map(in_fp64, numbers)
    exp_avg, exp_avg_sq, max_exp_avg_sq, remainder = member.buffers
    assert exp_avg is not None
    assert exp_avg_sq is not None
    dtype = wide_dtype(member.p)
    p, m, v = (x.to(dtype) for x in (member.p, exp_avg, exp_avg_sq))
    g = gradient.to(dtype) * (factor * member.sign).to(dtype)
    if remainder is not None:
        p = (p.view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)
    t = (member.step + 1.0).double()
    if rules.decoupled:
        p = p * rounded(1.0 - lr * weight_decay, dtype)
    else:
        g = g + rounded(weight_decay, dtype) * p
    m = m + rounded(1.0 - beta1, dtype) * (g - m)
    v = rounded(beta2, dtype) * v + rounded(1.0 - beta2, dtype) * g * g
    bound = v if max_exp_avg_sq is None else torch.maximum(max_exp_avg_sq.to(dtype), v)
    p = p - step_of(m, bound, t, lr, (beta1, beta2), eps)

    def keep(buffer: Tensor, x: Tensor, shift: int) -> None:
        if rules.rounding == "stochastic" and buffer.dtype == torch.bfloat16:
            bits = random_bits(rules.seed, t, number, x.shape, x.device) >> shift
            x = stochastically_rounded(x, bits)
        buffer.copy_(torch.where(skipped, buffer, x.to(buffer.dtype)))

    keep(exp_avg, m, SHIFTS[1])
    keep(exp_avg_sq, v, SHIFTS[2])
    if max_exp_avg_sq is not None:
        keep(max_exp_avg_sq, bound, SHIFTS[2])
    if remainder is not None:
        # NaN has no neighbours: rounded up, its bits would be those of zero.
        bits = torch.where(p.isnan(), torch.nan, p).view(torch.int32)
        high = torch.where(p.isnan(), bits, (bits + 0x8000) & -0x10000)
        keep(remainder, (bits - high).to(torch.int16), 0)
        p = high.view(torch.float32)
    keep(member.p, p, SHIFTS[0])
    member.step.add_(~skipped)


def step_of(
    m: Tensor,
    v: Tensor,
    t: Tensor,
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float | Tensor,
) -> Tensor:
    """lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps), for t in fp64."""
    beta1, beta2 = betas
    return (lr / (1.0 - beta1**t)).to(m.dtype) * (m / adamw_root(v, t, beta2, eps))


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
    """The low 32 bits of the product of two such numbers, which never needs more than 63 bits."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * (factor & 0xFFFF)) << 16)) & LOW_32


def stochastically_rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 numbers that bf16 represents, up or down with probabilities that make x the mean."""
    raw = x.view(torch.int32).long() & LOW_32
    up = (raw + (bits & 0xFFFF)) & 0xFFFF0000
    up = torch.where(up >= 1 << 31, up - (1 << 32), up).to(torch.int32).view(torch.float32)
    # Infinity and NaN have no neighbours.
    return torch.where(x.abs() < torch.inf, up, x)
