"""VeLO on a card: the launches of one dtype, and the members on one device that they move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import _learned_configs as configs
from ._learned_kernels import MOMENT_SUMS
from ._learned_launch import StatisticsBatch
from ._learned_part_launch import KernelMoving
from ._learned_parts import LearnedRules, Moved
from ._learned_tiles import DECAY
from ._members import Step
from ._tables import upload
from ._velo_kernels import LINE, _moments_kernel, _velo_apply_kernel
from ._velo_parts import VeLOMoving
from .learned_features import FACTORED_DECAYS, MOMENTUM_DECAYS, SQUARE_DECAYS, Statistics
from .velo_features import ELEMENT_FEATURES, Moments
from .velo_networks import SHAPES, SIZES

Tensor = torch.Tensor


class VeLOBatch(StatisticsBatch):
    """Tensors of one dtype with gradients of one dtype."""

    velo = True

    def __init__(
        self, ps: Sequence[Tensor], statistics: Sequence[Statistics], gradient: torch.dtype
    ) -> None:
        super().__init__(ps, statistics, gradient)
        shares, moments = (
            torch.empty(count, MOMENT_SUMS.value, dtype=torch.float64, device=self.device)
            for count in (self.moving.blocks.count, len(ps))
        )
        self.moment_shares, self.moments = shares, moments

    def add(self, skipped: Tensor) -> Tensor:
        """``[tensors, 9]``: means before the step; the norms of the features are kept."""
        blocks = self.moving.blocks
        self.launch(
            _moments_kernel, (len(self.ps),), (), configs.FOLD.num_warps, ROWS=configs.FOLD.rows
        )(
            (
                *(self.partials, self.moment_shares, self.moving.shapes, blocks.first, skipped),
                *(self.norms, self.moments),
            )
        )
        return self.moments

    def folded(self, mixed: Tensor) -> Tensor:
        """The perceptrons as the kernel reads them: f s W1 = f (s W1), s the features' norms."""
        w1, rest = mixed.split((SIZES[0], sum(SIZES[1:])), 1)
        w1 = F.pad(w1.view(-1, *SHAPES[0]), (0, 32 - ELEMENT_FEATURES)) * self.norms[:, None]
        lines = torch.cat((w1.flatten(1), rest), 1)
        return F.pad(lines, (0, LINE.value - lines.shape[1]))

    def apply(
        self,
        numbers: Tensor,
        decays: Tensor,
        mixed: Tensor,
        scales: Tensor,
        skipped: Tensor,
        exp_mult: float,
        step_mult: float,
    ) -> None:
        """Move the parameters by perceptrons ``[tensors, 159]``."""
        stretch = self.applying.stretch
        self.launch(
            _velo_apply_kernel,
            (self.applying.blocks.count,),
            (len(self.ps),),
            stretch.num_warps,
            **self.dtypes(),
            SIZE=stretch.size,
        )(
            (
                *(self.addresses.table, self.gradients.table, *self.applying.tables()),
                *(numbers, decays, self.middles, self.folded(mixed), scales, skipped),
            ),
            (exp_mult, step_mult),
        )


class VeLOPart(KernelMoving, VeLOMoving):
    """The members on one device that kernels serve."""

    batch = VeLOBatch

    def __init__(self, members: Sequence[Moved], rules: LearnedRules, device: torch.device) -> None:
        super().__init__(members, rules, device)
        starts = (MOMENTUM_DECAYS, SQUARE_DECAYS, FACTORED_DECAYS)
        self.offsets = [torch.zeros(len(some), device=device) for some in starts]
        self.lengths = upload([member.p.numel() for member in self.moved], torch.float64, device)

    def see(self, step: Step) -> Moments:
        self.step = step
        self.ready(step)
        found = []
        for batch, places, _ in self.batches:
            batch.decays = self.any_decays
            batch.advance(self.table[places], self.decays, step.skipped)
            found.append(batch.add(step.skipped))
        p2, mean_m, square_m, mean_v, square_v = torch.cat(found).split((1, 3, 3, 1, 1), 1)
        var_m, var_v = square_m - mean_m.square(), square_v - mean_v.square()
        return Moments(p2[:, 0], mean_m, var_m, mean_v[:, 0], var_v[:, 0])

    def penalty(self, moments: Moments) -> Tensor:
        return (self.table[:, DECAY.value].double() * self.lengths * moments.p2).sum()

    def apply(self, mixed: Tensor, scales: Tensor) -> None:
        mixed, scales = mixed.float(), scales.float()
        multipliers = self.networks.exp_mult, self.networks.step_mult
        for batch, places, _ in self.batches:
            given = mixed[places], scales[places], self.step.skipped
            batch.apply(self.table[places], self.decays, *given, *multipliers)
