"""AdamW in plain torch, without a host synchronisation: the formula, one parameter after the other,
or on a CPU torch's own fused step, which computes the same in place.

With g the gradient, unscaled, clipped and of the right sign, t the count of steps taken:

    m' = m + (1 - beta1) (g - m)    v' = beta2 v + (1 - beta2) g^2    v^ = max(v^, v') for amsgrad
    p' = (1 - lr wd) p - lr / (1 - beta1^t) m' / (sqrt(v^ / (1 - beta2^t)) + eps)

wd p is added to g instead where decay is not decoupled. Kingma and Ba, Adam, arXiv 1412.6980;
Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adam import adam

from .._core.precision import wide_dtype
from ..common.placement import is_dense
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

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        # The places of members that one call may update.
        self.batches: dict[tuple, list[int]] = {}
        for place, member in enumerate(self.members):
            key = member.group, member.sign, member.key, is_dense(member.p)
            self.batches.setdefault(key, []).append(place)

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Take a step's gradients, in the members' order, and the groups' numbers."""
        self.gradients, self.numbers = gradients, group_numbers(groups, self.device)

    def point_numbers(self, groups: list[dict]) -> None:
        self.numbers = group_numbers(groups, self.device)

    def move(self, step: Step) -> None:
        """Take the step, unless it is skipped."""
        rules = self.rules
        factor = decide(step, rules.max_grad_norm, self.device)
        scales = step.grad_scale is not None or rules.max_grad_norm is not None
        skips = step.squares is not None or step.found_inf is not None
        found_inf = step.skipped.float() if skips else None
        for (group, *_), places in self.batches.items():
            members = [self.members[place] for place in places]
            gradients = [self.gradients[place] for place in places]
            numbers = self.numbers[5 * group : 5 * group + 5]
            by_torch = is_fused(members[0])
            if by_torch and not scales and is_stored_as_computed(members[0], rules):
                stored = [(x.p, *x.buffers[:3]) for x in members]
                move_fused(members, stored, gradients, numbers, found_inf, rules)
                continue
            # One after the other: together they would take the memory of a whole model again.
            for place, member, gradient in zip(places, members, gradients, strict=True):
                if not by_torch:
                    move(member, gradient, numbers, factor, step.skipped, rules, place)
                    continue
                its = widened(member)
                g = gradient.to(its[0].dtype)
                g = g * factor.to(g.dtype) if scales else g
                move_fused([member], [its], [g], numbers, found_inf, rules)
                keep(member, its, member.step.double(), step.skipped, rules, place)


Wide = tuple[Tensor, Tensor, Tensor, Tensor | None]


def is_fused(member: Member) -> bool:
    """Whether torch's fused AdamW serves a member: it reads memory in its order, gaps included, and
    loses some NaN of amsgrad's.
    """
    return takes_fused(member.p.device) and is_dense(member.p) and not member.key.amsgrad


def takes_fused(device: torch.device) -> bool:
    """Whether the reference takes torch's fused AdamW on a device."""
    return device.type == "cpu"


def is_stored_as_computed(member: Member, rules: Rules) -> bool:
    """Whether torch's fused AdamW rounds as the rules say: it computes bf16 in fp32, and rounds to
    the nearest.
    """
    key, rounds = member.key, rules.rounding == "nearest"
    same_dtypes = key.parameter == key.gradient == key.state and not key.remainder
    return same_dtypes and (rounds or key.parameter == wide_dtype(member.p))


def widened(member: Member) -> Wide:
    """p, exp_avg, exp_avg_sq and max_exp_avg_sq in fp64 for an fp64 parameter, else in fp32: the
    member's own where they are that already.
    """
    dtype = wide_dtype(member.p)
    exp_avg, exp_avg_sq, most, remainder = member.buffers
    assert exp_avg is not None
    assert exp_avg_sq is not None
    p = member.p.to(dtype)
    if remainder is not None:
        p = (p.view(torch.int32) + remainder.to(torch.int32)).view(torch.float32)
    return p, exp_avg.to(dtype), exp_avg_sq.to(dtype), None if most is None else most.to(dtype)


def move_fused(
    members: Sequence[Member],
    wide: Sequence[tuple],
    gradients: Sequence[Tensor],
    numbers: Sequence[float | Tensor],
    found_inf: Tensor | None,
    rules: Rules,
) -> None:
    """One step of torch's fused AdamW of members of one batch, unless found_inf is 1: of their
    counts of steps and, in place, of p, exp_avg, exp_avg_sq and None of each.
    """
    lr, *others = numbers
    # These only as numbers.
    beta1, beta2, eps, weight_decay = (
        x.item() if isinstance(x, Tensor) else x  # sync: none, they are on the host
        for x in others
    )
    ps, exp_avgs, exp_avg_sqs, _ = map(list, zip(*wide, strict=True))
    adam(
        ps,
        list(gradients),
        exp_avgs,
        exp_avg_sqs,
        [],
        [member.step for member in members],
        foreach=False,
        fused=True,
        found_inf=found_inf,
        decoupled_weight_decay=rules.decoupled,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=members[0].sign < 0.0,
    )


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
    p, m, v, most = widened(member)
    dtype = p.dtype
    g = gradient.to(dtype) * (factor * member.sign).to(dtype)
    t = (member.step + 1.0).double()
    if rules.decoupled:
        p = p * rounded(1.0 - lr * weight_decay, dtype)
    else:
        g = g + rounded(weight_decay, dtype) * p
    m = m + rounded(1.0 - beta1, dtype) * (g - m)
    v = rounded(beta2, dtype) * v + rounded(1.0 - beta2, dtype) * g * g
    bound = v if most is None else torch.maximum(most, v)
    p = p - step_of(m, bound, t, lr, (beta1, beta2), eps)
    keep(member, (p, m, v, bound), t, skipped, rules, number)
    member.step.add_(~skipped)


def keep(member: Member, wide: Wide, t: Tensor, skipped: Tensor, rules: Rules, number: int) -> None:
    """Store what a step computed of a member, of ``widened``'s form, rounded as the rules say,
    unless it is skipped: t is the count of steps with this one.
    """
    exp_avg, exp_avg_sq, most, remainder = member.buffers
    p, m, v, bound = wide

    def store(buffer: Tensor | None, x: Tensor | None, shift: int) -> None:
        if buffer is None or x is None or x is buffer:
            return
        if rules.rounding == "stochastic" and buffer.dtype == torch.bfloat16:
            bits = random_bits(rules.seed, t, number, x.shape, x.device) >> shift
            x = stochastically_rounded(x.float(), bits)
        buffer.copy_(torch.where(skipped, buffer, x.to(buffer.dtype)))

    store(exp_avg, m, SHIFTS[1])
    store(exp_avg_sq, v, SHIFTS[2])
    store(most, bound, SHIFTS[2])
    if remainder is not None:
        # NaN has no neighbours: rounded up, its bits would be those of zero.
        bits = torch.where(p.isnan(), torch.nan, p).view(torch.int32)
        high = torch.where(p.isnan(), bits, (bits + 0x8000) & -0x10000)
        store(remainder, (bits - high).to(torch.int16), 0)
        p = high.view(torch.float32)
    store(member.p, p, SHIFTS[0])


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
