"""Launches of the learned optimizer's network, after those of the statistics: one that folds the
normalisation into the first layer of each tensor, one that updates the parameters, and two of the
derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .._core.backends import constant_when_compiled, device_properties
from .._core.lazy import lazy_module
from .._core.precision import allows_tf32
from ..common.statistics.launch import FOLD, StatisticsBatch, StatisticsKernelPart, Sums
from ..common.statistics.layout import Stretch, Stretches
from ..common.statistics.reference import Statistics
from ..common.step import Step
from ..common.tables import addresses_of, upload
from .reference import TIMESCALES, Network, time_features

if TYPE_CHECKING:
    from . import kernels, kernels_backward
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")

Tensor = torch.Tensor
# Both unmeasured. The products of BACKWARD are IEEE: three of TF32 take more registers than there
# are.
BACKWARD = Stretch(size=32, num_warps=4, shortest=4096, programs=128)
ADD_PARTIALS = Sums(rows=16, size=128, num_warps=4)
# Numbers of the gradients of W1 [32 features, 32], b1, W2 [32 inputs, 32], b2, W3 [2, 32] and b3.
GRADIENT_SIZES = (1024, 32, 1024, 32, 64, 2)
GRADIENTS = sum(GRADIENT_SIZES)


class LearnedBatch(StatisticsBatch):
    """The statistics of a batch of tensors, and the network."""

    def __init__(
        self,
        ps: Sequence[Tensor],
        statistics: Sequence[Statistics],
        gradient: torch.dtype,
        updates: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(ps, statistics, gradient, updates)
        self.timescales = upload(TIMESCALES, torch.float64, self.device)
        self.biases = self.empty(len(ps), 32)
        self.folded = self.empty(len(ps), 32, 32)

    def fold(
        self, numbers: Tensor, weights: Sequence[Tensor], extra: Tensor | None, skipped: Tensor
    ) -> None:
        """Write each tensor's own first layer."""
        w1, b1 = weights[:2]
        added = 0 if extra is None else extra.shape[1]
        programs = (len(self.ps),)
        self.launch(kernels, "fold_kernel", programs, (added,), FOLD.num_warps, ROWS=FOLD.rows)(
            (
                *(self.partials, self.moving.shapes, self.moving.blocks.first, numbers),
                *(self.timescales, w1, b1, w1 if extra is None else extra, skipped),
                *(self.norms, self.folded, self.biases),
            )
        )

    def apply(
        self,
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        skipped: Tensor,
        exp_mult: float,
        step_mult: float,
    ) -> None:
        """Update the parameters, or write their updates."""
        stretch, blocks = self.applying.stretch, self.applying.blocks
        if not blocks.count:
            return
        self.launch(
            kernels,
            "apply_kernel",
            (blocks.count,),
            (len(self.ps),),
            stretch.num_warps,
            stretch.registers if device_properties(self.device).capability == 90 else None,
            **self.dtypes(),
            IN_PLACE=self.updates is None,
            PRECISION=precision(),
            SIZE=stretch.size,
        )(
            (
                *(self.addresses.table, self.gradients.table, *self.applying.tables()),
                *(numbers, decays, self.row_means, self.folded, self.biases, *weights[2:], skipped),
            ),
            (exp_mult, step_mult),
        )

    def weight_gradients(
        self,
        upstream: Sequence[Tensor],
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        exp_mult: float,
        step_mult: float,
    ) -> Tensor:
        """``[tensors, 2178]``: of each tensor the gradients of W1's part for elements, transposed,
        b1, W2, transposed, b2, W3 and b3.
        """
        stretches = Stretches(self.layouts, BACKWARD, self.device)
        stretch, blocks, adding = stretches.stretch, stretches.blocks, ADD_PARTIALS
        self.addresses.hold([*self.lines, *addresses_of(upstream)])
        partials = self.empty(max(blocks.count, 1), GRADIENTS)
        if blocks.count:
            self.launch(
                kernels_backward,
                "learned_backward_kernel",
                (blocks.count,),
                (len(self.ps),),
                stretch.num_warps,
                **self.dtypes(),
                SIZE=stretch.size,
            )(
                (
                    *(self.addresses.table, self.gradients.table, *stretches.tables()),
                    *(numbers, decays, self.row_means, self.norms, self.folded, self.biases),
                    *(*weights[2:], partials),
                ),
                (exp_mult, step_mult),
            )
        gradients = self.empty(len(self.ps), GRADIENTS)
        self.launch(
            kernels_backward,
            "add_partials_kernel",
            (len(self.ps), -(-GRADIENTS // adding.size)),
            (),
            adding.num_warps,
            ROWS=adding.rows,
            SIZE=adding.size,
        )((partials, stretches.shapes, blocks.first, gradients))
        return gradients

    def times(self, numbers: Tensor) -> Tensor:
        """``[tensors, 11]``: the features of time."""
        return time_features(numbers[:, 1]).float()


@constant_when_compiled
def precision() -> str:
    """Of the network's products: three of TF32, which together have fp32's precision, or one where
    torch's own switch allows TF32.
    """
    return "tf32" if allows_tf32() else "tf32x3"


class KernelPart(StatisticsKernelPart):
    """The members on one device that kernels serve."""

    batch = LearnedBatch

    def move(self, step: Step) -> None:
        """Take the step, unless it is skipped."""
        mlp: Network = self.rules.network
        self.offsets = mlp.offsets()
        self.decide(step)
        weights = [x.detach().contiguous() for x in mlp.weights()]
        extra = None if self.extra is None else torch.stack(self.extra).float()
        for batch, places, _ in self.batches:
            numbers = self.table[places]
            batch.advance(numbers, self.decays, step.skipped)
            added = None if extra is None else extra[places]
            batch.fold(numbers, weights, added, step.skipped)
            batch.apply(numbers, self.decays, weights, step.skipped, mlp.exp_mult, mlp.step_mult)
