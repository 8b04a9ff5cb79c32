"""Members of VeLO's step, and their plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._learned_parts import LearnedRules, Moved, Moving, rounded
from ._members import Step
from .learned_features import Statistics, advanced
from .reference import decide
from .velo_features import Moments, moments_of, rank_features, seen_gradient, start_decays, step_of
from .velo_networks import VeLONetworks, split

Tensor = torch.Tensor


class VeLOMoving(Moving):
    """Members on one device, whose step has two halves: what the LSTM sees of them, and their move
    by the perceptrons that it mixes.

    Attributes:
        ranks: ``[members, 5]``, of ``rank_features``.
        step: that is being taken.
    """

    step: Step

    def __init__(self, members: Sequence[Moved], rules: LearnedRules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        self.ranks = rank_features([member.p.shape for member in self.moved], device)

    @property
    def moved(self) -> Sequence[Moved]:
        return self.members  # type: ignore[return-value]

    @property
    def networks(self) -> VeLONetworks:
        return self.rules.network  # type: ignore[attr-defined]

    def decays_of(self, member: Moved) -> float | Tensor:
        """Weight decay: a number, or a 0-d tensor in fp64."""
        return number(self.numbers[2 * member.group + 1])

    @property
    def any_decays(self) -> bool:
        """Whether a weight decay may be another than 0."""
        return any(isinstance(x, Tensor) or x != 0.0 for x in self.numbers[1::2])

    def see(self, step: Step) -> Moments:
        """Decide, move the statistics, and return what the tensors were before."""
        raise NotImplementedError

    def penalty(self, moments: Moments) -> Tensor:
        """wd sum x^2 over the members, 0-d fp64."""
        raise NotImplementedError

    def apply(self, mixed: Tensor, scales: Tensor) -> None:
        """Move the parameters: ``[members, 159]`` and ``[members]``."""
        raise NotImplementedError


class VeLOReferencePart(VeLOMoving):
    """Plain torch, one parameter after the other."""

    def __init__(self, members: Sequence[Moved], rules: LearnedRules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        self.decays = start_decays(device)
        self.seen: list[tuple[Tensor, Statistics]] = []

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Sums of squares in fp64, as ``total_squares`` takes them."""
        return [(None, g.double().square().sum().view(1)) for g in self.gradients]

    def see(self, step: Step) -> Moments:
        self.step = step
        factor = decide(step, self.rules.max_grad_norm, self.device)
        self.seen, found = [], []
        for member, gradient in zip(self.moved, self.gradients, strict=True):
            p, kept = member.p, member.statistics
            dtype = kept.square.dtype
            g = gradient.to(dtype) * factor.to(dtype)
            g = seen_gradient(g, p.to(dtype), rounded(self.decays_of(member), dtype))
            found.append(moments_of(p, kept))
            self.seen.append((g, advanced(kept, g, self.decays)))
        return Moments(*(torch.cat(some) for some in zip(*found, strict=True)))

    def penalty(self, moments: Moments) -> Tensor:
        shares = [
            self.decays_of(member) * member.p.numel() * p2
            for member, p2 in zip(self.moved, moments.p2, strict=True)
        ]
        return torch.stack(shares).sum()

    def apply(self, mixed: Tensor, scales: Tensor) -> None:
        multipliers = self.networks.exp_mult, self.networks.step_mult
        skipped = self.step.skipped
        for place, (member, (g, after)) in enumerate(zip(self.moved, self.seen, strict=True)):
            p, kept = member.p, member.statistics
            dtype = kept.square.dtype
            lr = rounded(number(self.numbers[2 * member.group]), dtype)
            step = step_of(split(mixed[place]), p, g, after, scales[place], *multipliers)
            p.copy_(torch.where(skipped, p, (p.to(dtype) - lr * step).to(p.dtype)))
            for old, new in zip(kept, after, strict=True):
                old.copy_(torch.where(skipped, old, new))
        self.seen = []


def number(x: float | Tensor) -> float | Tensor:
    return x.double().reshape(()) if isinstance(x, Tensor) else x
