"""VeLO's launches, after those of the statistics: one that adds the moments of each tensor, and one
that updates the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .._core.lazy import lazy_module
from ..common.launch import planned
from ..common.statistics.launch import FOLD, StatisticsBatch, StatisticsKernelPart
from ..common.statistics.members import Member, Rules
from ..common.statistics.reference import START_DECAYS
from ..common.step import Step
from ..common.tables import upload
from .parts import VeLOPart
from .reference import ELEMENT_FEATURES, SHAPES, SIZES, Moments

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = lazy_module(__package__, "kernels")

Tensor = torch.Tensor


class VeLOBatch(StatisticsBatch):
    """Tensors of one dtype with gradients of one dtype."""

    velo = True

    def plan_network(self) -> None:
        self.moment_partials, self.moments = (
            torch.empty(count, kernels.MOMENT_SUMS.value, dtype=torch.float64, device=self.device)
            for count in (self.moving.blocks.count, len(self.ps))
        )
        self.line = kernels.LINE.value

    def add_moments(self, skipped: Tensor) -> Tensor:
        """``[tensors, 9]``: means before the step; writes the norms of the features, too."""
        launch = planned(kernels, self.device, "moments_kernel", (len(self.ps),), (), FOLD)
        tables = self.moving.shapes, self.moving.blocks.tables[1]
        outputs = self.norms, self.moments
        launch((self.partials, self.moment_partials, *tables, skipped, *outputs))
        return self.moments

    def folded(self, mixed: Tensor) -> Tensor:
        """The perceptrons as the kernel reads them: f s W1 = f (s W1), s the features' norms."""
        w1, others = mixed.split((SIZES[0], sum(SIZES[1:])), 1)
        w1 = F.pad(w1.view(-1, *SHAPES[0]), (0, 32 - ELEMENT_FEATURES)) * self.norms[:, None]
        lines = torch.cat((w1.flatten(1), others), 1)
        return F.pad(lines, (0, self.line - lines.shape[1]))

    def apply(
        self,
        numbers: Tensor,
        decays: Tensor,
        mixed: Tensor,
        scales: Tensor,
        skipped: Tensor,
        multipliers: tuple[float, float],
    ) -> None:
        """Move the parameters by perceptrons ``[tensors, 159]``."""
        applying = self.applying
        plan = "velo_apply_kernel", applying.grid, (len(self.ps),), applying.stretch
        launch = planned(kernels, self.device, *plan, **self.constants)
        operands = self.addresses.table, self.gradients.table, *applying.tables, numbers, decays
        inputs = self.row_means, self.folded(mixed), scales, skipped
        launch((*operands, *inputs), multipliers)


class VeLOKernelPart(StatisticsKernelPart, VeLOPart):
    """The members on one device that kernels serve."""

    batch = VeLOBatch

    def __init__(self, members: Sequence[Member], rules: Rules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device=device)
        self.offsets = [zeros(len(some)) for some in START_DECAYS]
        self.lengths = upload([member.p.numel() for member in self.members], torch.float64, device)

    def advance(self, step: Step) -> Moments:
        self.step = step
        self.decide(step)
        moments = []
        for batch, places, _ in self.batches:
            batch.decays = self.any_decays
            batch.advance(self.table[places], self.decays, step.skipped)
            moments.append(batch.add_moments(step.skipped))
        p2, mean_m, square_m, mean_v, square_v = torch.cat(moments).split((1, 3, 3, 1, 1), 1)
        var_m, var_v = square_m - mean_m.square(), square_v - mean_v.square()
        return Moments(p2[:, 0], mean_m, var_m, mean_v[:, 0], var_v[:, 0])

    def penalty(self, moments: Moments) -> Tensor:
        return (self.decay_numbers.double() * self.lengths * moments.p2).sum()

    def apply(self, mixed: Tensor, scales: Tensor) -> None:
        mixed, scales = mixed.float(), scales.float()
        multipliers = self.networks.exp_mult, self.networks.step_mult
        for batch, places, _ in self.batches:
            operands = mixed[places], scales[places], self.step.skipped
            batch.apply(self.table[places], self.decays, *operands, multipliers)
