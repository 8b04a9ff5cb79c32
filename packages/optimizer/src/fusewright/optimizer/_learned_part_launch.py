"""A learned optimizer's parameters on a card: one launch prepares a step, some more move all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ._configs import PREPARE
from ._group_numbers import GroupNumbers
from ._launch import Launch
from ._learned_kernels import GROUP_NUMBERS, _learned_prepare_kernel
from ._learned_launch import LearnedBatch
from ._learned_parts import LearnedRules, Moved, Moving
from ._learned_tiles import DECAY_COUNT, NUMBERS
from ._members import Step
from ._norm_launch import Squares
from ._tables import upload
from .learned_features import FACTORED_DECAYS, MOMENTUM_DECAYS, SQUARE_DECAYS
from .update_mlp import UpdateMLP

Tensor = torch.Tensor


class KernelMoving(Moving):
    """The members on one device that kernels serve, and the launch that prepares a step.

    Attributes:
        batch: what a batch of them is.
        offsets: of the decays.
    """

    batch: Any
    offsets: Sequence[Tensor] = ()

    def __init__(self, members: Sequence[Moved], rules: LearnedRules, device: torch.device) -> None:
        keyed = sorted(members, key=dtypes_of)
        super().__init__(keyed, rules, device)
        self.batches: list[tuple[Any, slice, Squares]] = []
        for _, found in itertools.groupby(keyed, key=dtypes_of):
            some = list(found)
            start = sum(len(batch.ps) for batch, *_ in self.batches)
            gradient = some[0].gradient
            batch = self.batch([x.p for x in some], [x.statistics for x in some], gradient)
            squares = Squares([x.p.numel() for x in some], gradient, device)
            self.batches.append((batch, slice(start, start + len(some)), squares))
        self.table = torch.empty(len(keyed), NUMBERS.value, device=device)
        self.decays = torch.empty(2 * DECAY_COUNT.value, device=device)
        starts = (*MOMENTUM_DECAYS, *SQUARE_DECAYS, *FACTORED_DECAYS)
        self.rests = upload([1.0 - x for x in starts], torch.float64, device)
        self.groups = upload([x.group for x in keyed], torch.int32, device)
        self.signs = upload([x.sign for x in keyed], torch.float32, device)
        self.steps = upload([x.statistics.step.data_ptr() for x in keyed], torch.int64, device)
        self.group_numbers = GroupNumbers(GROUP_NUMBERS.value * rules.groups, device)
        self.most = upload([rules.max_grad_norm or 0.0], torch.float64, device)
        self.prepare: dict[tuple, Launch] = {}

    def point(self, gradients: list[Tensor], groups: list[dict]) -> None:
        """Have the tables show these gradients, in the members' order, and the groups' numbers."""
        super().point(gradients, groups)
        for batch, places, _ in self.batches:
            batch.point(gradients[places])
        self.group_numbers.point(self.numbers)

    def squares(self) -> list[tuple[Any, Tensor]]:
        """Sums of squares in fp64, as ``total_squares`` takes them."""
        return [(None, add(batch.gradients.table, batch.aligned)) for batch, _, add in self.batches]

    def ready(self, step: Step) -> None:
        """Decide whether the step is taken, and have the tables show its numbers."""
        rules: LearnedRules = self.rules  # type: ignore[assignment]
        shares = 0 if step.squares is None else len(step.squares)
        key = (shares, step.grad_scale is None, step.found_inf is None)
        if key not in self.prepare:
            self.prepare[key] = Launch(
                _learned_prepare_kernel,
                (1,),
                self.device,
                (shares, len(self.members)),
                dict(num_warps=PREPARE.num_warps),
                HAS_NORM=step.squares is not None,
                CLIPS=rules.max_grad_norm is not None,
                HAS_SCALE=step.grad_scale is not None,
                HAS_FOUND=step.found_inf is not None,
                VELO=self.batch.velo,
                SIZE=PREPARE.size,
            )
        self.prepare[key](
            (
                *(step.squares, self.most, step.grad_scale, step.found_inf),
                *(self.group_numbers.addresses, self.group_numbers.wide, self.groups, self.signs),
                *(self.steps, *self.offsets, self.rests),
                *(step.norm, step.skipped, step.skipped_count, self.table, self.decays),
            )
        )


class LearnedPart(KernelMoving):
    """The members of ``LearnedOptimizer``."""

    batch = LearnedBatch

    def move(self, step: Step) -> None:
        """Take the step, if it is to be taken."""
        mlp: UpdateMLP = self.rules.network  # type: ignore[attr-defined]
        self.offsets = mlp.offsets()
        self.ready(step)
        weights = [x.detach().contiguous() for x in mlp.weights()]
        extra = None if self.extra is None else torch.stack(self.extra).float()
        for batch, places, _ in self.batches:
            numbers = self.table[places]
            batch.advance(numbers, self.decays, step.skipped)
            added = None if extra is None else extra[places]
            batch.fold(numbers, weights, added, step.skipped)
            batch.apply(numbers, self.decays, weights, step.skipped, mlp.exp_mult, mlp.step_mult)


def dtypes_of(member: Moved) -> str:
    """What decides which launches serve a member."""
    return repr((member.p.dtype, member.gradient))
