"""Members of VeLO's step, and the step in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.reference import decide, in_fp64, rounded
from ..common.sharding import Summing, summed_together
from ..common.statistics.members import Member, Rules, StatisticsPart
from ..common.statistics.reference import Statistics
from ..common.statistics.shards import advanced_member, features_of, take
from ..common.step import Step
from .reference import (
    Moments,
    decayed_gradient,
    moment_sums,
    moments_from,
    moments_of,
    rank_features,
    split,
    start_decays,
    step_of,
)

Tensor = torch.Tensor


class VeLOPart(StatisticsPart):
    """Members on one device, whose step has two halves: the statistics, of which the LSTM sees
    moments, and the update by the perceptrons that it mixes.

    Attributes:
        ranks: ``[members, 5]``, of ``rank_features``.
        step: that is being taken.
    """

    step: Step

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        self.ranks = rank_features([member.shape for member in self.members], device)

    @property
    def networks(self) -> Any:
        return self.rules.network

    @property
    def any_decays(self) -> bool:
        """Whether a weight decay may be another than 0."""
        return any(isinstance(x, Tensor) or x != 0.0 for x in self.numbers[1::2])

    def advance(self, step: Step) -> Moments:
        """Decide, update the statistics, and return the tensors' moments before the step."""
        raise NotImplementedError

    def penalty(self, moments: Moments) -> Tensor:
        """wd sum x^2 over the members, 0-d fp64."""
        raise NotImplementedError

    def apply(self, mixed: Tensor, scales: Tensor) -> None:
        """Update the parameters by perceptrons ``[members, 159]`` and scales ``[members]``."""
        raise NotImplementedError


class VeLOReferencePart(VeLOPart):
    """The members on one device that plain torch serves: whole ones one after the other, sums over
    shards together.
    """

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        self.decays = start_decays(device)
        # Gradients with weight decay, and statistics after the step.
        self.advanced: list[tuple[Tensor, Statistics]] = []

    def decay_of(self, member: Member) -> float | Tensor:
        """Weight decay: a number, or a 0-d tensor in fp64."""
        return in_fp64(self.numbers[2 * member.group + 1])

    def advance(self, step: Step) -> Moments:
        self.step = step
        factor = decide(step, self.rules.max_grad_norm, self.device)
        pairs = zip(self.members, self.gradients, strict=True)
        found = summed_together(
            (member.mesh, self._advanced(member, g, factor)) for member, g in pairs
        )
        self.advanced = [(g, after) for _, g, after in found]
        return Moments(*(torch.cat(some) for some in zip(*(x for x, *_ in found), strict=True)))

    def _advanced(
        self, member: Member, gradient: Tensor, factor: Tensor
    ) -> Summing[tuple[Moments, Tensor, Statistics]]:
        """A member's moments before the step, gradient with weight decay, and statistics after."""
        p, before = member.p, member.statistics
        dtype = before.square.dtype
        g = gradient.to(dtype) * factor.to(dtype)
        g = decayed_gradient(g, p.to(dtype), rounded(self.decay_of(member), dtype))
        if member.is_sharded:
            (sums,) = yield [moment_sums(p, before)]
            moments = moments_from(sums, member.shape.numel())
        else:
            moments = moments_of(p, before)
        after = yield from advanced_member(member, g, self.decays)
        return moments, g, after

    def penalty(self, moments: Moments) -> Tensor:
        penalties = [
            self.decay_of(member) * member.shape.numel() * p2
            for member, p2 in zip(self.members, moments.p2, strict=True)
        ]
        return torch.stack(penalties).sum()

    def apply(self, mixed: Tensor, scales: Tensor) -> None:
        moves = (
            (member.mesh, self._moved(member, *self.advanced[place], mixed[place], scales[place]))
            for place, member in enumerate(self.members)
        )
        summed_together(moves)
        self.advanced = []

    def _moved(
        self, member: Member, g: Tensor, after: Statistics, mixed: Tensor, scale: Tensor
    ) -> Summing[None]:
        """Move one member."""
        p, dtype, skipped = member.p, after.square.dtype, self.step.skipped
        lr = rounded(in_fp64(self.numbers[2 * member.group]), dtype)
        features = yield from features_of(member, g, after, velo=True)
        multipliers = self.networks.exp_mult, self.networks.step_mult
        step = step_of(split(mixed), features, scale, *multipliers)
        p.copy_(torch.where(skipped, p, (p.to(dtype) - lr * step).to(p.dtype)))
        take(member.statistics, after, skipped)
