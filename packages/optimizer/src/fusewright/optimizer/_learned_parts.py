"""Members of a learned optimizer's step, and their plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._members import Part, Step, number_on
from .learned_features import Statistics, advanced, update_of
from .reference import decide
from .update_mlp import UpdateMLP

Tensor = torch.Tensor
# A group's numbers in the order of the kernels' table.
GROUP_OPTIONS = ("lr", "weight_decay")


class Moved(NamedTuple):
    """A parameter, its statistics and how it is moved.

    Attributes:
        place: among all of the optimizer.
        group: index of its parameter group.
        sign: -1 where the objective is maximized.
        gradient: dtype of its gradient.
    """

    place: int
    p: Tensor
    statistics: Statistics
    group: int
    sign: float
    gradient: torch.dtype


class LearnedRules(NamedTuple):
    """What holds of all parameters of a learned optimizer.

    Attributes:
        network: an ``UpdateMLP``, or VeLO's networks.
        max_grad_norm: None where gradients are not clipped.
        groups: how many there are.
    """

    network: Any
    max_grad_norm: float | None
    groups: int


class Moving(Part):
    """Members on one device that are moved in one way.

    Attributes:
        extra: of each member in this step, None for a network without.
    """

    def __init__(self, members: Sequence[Moved], rules: LearnedRules, device: torch.device) -> None:
        self.members, self.rules, self.device = members, rules, device  # type: ignore[assignment]
        self.gradients: list[Tensor] = []
        self.plain = False
        self.extra: list[Tensor] | None = None
        self.numbers: list[float | Tensor] = []

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        self.gradients = gradients
        self.numbers = [
            number_on(self.device, group[name]) for group in groups for name in GROUP_OPTIONS
        ]

    def move(self, step: Step) -> None:
        """Take the step, if it is to be taken."""
        raise NotImplementedError


class ReferencePart(Moving):
    """Plain torch, one parameter after the other."""

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Sums of squares in fp64, as ``total_squares`` takes them."""
        return [(None, g.double().square().sum().view(1)) for g in self.gradients]

    def move(self, step: Step) -> None:
        """Take the step, if it is to be taken."""
        mlp: UpdateMLP = self.rules.network  # type: ignore[attr-defined]
        factor = decide(step, self.rules.max_grad_norm, self.device)
        decays = mlp.decays()
        for place, (member, gradient) in enumerate(zip(self.members, self.gradients, strict=True)):
            p, kept = member.p, member.statistics  # type: ignore[attr-defined]
            dtype = kept.square.dtype
            lr, weight_decay = (
                x.double().reshape(()) if isinstance(x, Tensor) else x
                for x in self.numbers[2 * member.group : 2 * member.group + 2]
            )
            g = gradient.to(dtype) * (factor * member.sign).to(dtype)
            after = advanced(kept, g, decays)
            extra = None if self.extra is None else self.extra[place]
            update = update_of(mlp.weights(), p, g, after, extra, mlp.exp_mult, mlp.step_mult)
            moved = rounded(1.0 - lr * weight_decay, dtype) * p.to(dtype)
            moved = moved - rounded(lr, dtype) * update
            p.copy_(torch.where(step.skipped, p, moved.to(p.dtype)))
            for old, new in zip(kept, after, strict=True):
                old.copy_(torch.where(step.skipped, old, new))


def rounded(x: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x
