"""Launches of the learned optimizer's network, after those of the statistics: one that folds the
normalisation into the first layer of each tensor, one that updates the parameters, and two of the
derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.backends import constant_when_compiled
from .._core.launches import cdiv
from .._core.lazy import lazy_module
from .._core.precision import allows_tf32
from ..common.launch import planned
from ..common.statistics.launch import FOLD, LINES, StatisticsBatch, StatisticsKernelPart, Sums
from ..common.statistics.layout import Stretch, Stretches
from ..common.step import Step
from ..common.tables import addresses_of, upload
from .reference import TIMESCALES, Network, time_features

if TYPE_CHECKING:
    from . import kernels, kernels_backward, kernels_strips
else:
    kernels = lazy_module(__package__, "kernels")
    kernels_backward = lazy_module(__package__, "kernels_backward")
    kernels_strips = lazy_module(__package__, "kernels_strips")

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

    def plan_network(self) -> None:
        self.timescales = upload(TIMESCALES, torch.float64, self.device)
        self.biases, self.scales = (self.empty(len(self.ps), 32) for _ in range(2))
        self.folded = self.empty(len(self.ps), 32, 32)
        self.layers = self.empty(max(self.applying_strips.lines, 1), 32)

    def move(
        self,
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        extra: Tensor | None,
        skipped: Tensor,
        multipliers: tuple[float, float],
    ) -> None:
        """Move the statistics, write each tensor's own first layer, and move the parameters or
        write their updates.
        """
        self.advance(numbers, decays, skipped)
        w1, b1 = weights[:2]
        added = 0 if extra is None else extra.shape[1]
        plan = (len(self.ps),), (added,), FOLD
        launch = planned(kernels, self.device, "fold_kernel", *plan)
        sums = self.partials, self.moving.shapes, self.ranges
        inputs = numbers, self.timescales, w1, b1, w1 if extra is None else extra, skipped
        launch((*sums, *inputs, self.norms, self.folded, self.biases, self.scales))
        options = dict(IN_PLACE=self.updates is None, PRECISION=precision(), **self.constants)
        if self.applying.blocks.count:
            self.move_stretches(numbers, decays, weights, skipped, multipliers, options)
        if self.applying_strips.places:
            self.move_strips(numbers, decays, weights, skipped, multipliers, options)

    def move_stretches(
        self,
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        skipped: Tensor,
        multipliers: tuple[float, float],
        options: dict[str, Any],
    ) -> None:
        """The last launch, of tensors in stretches."""
        w1, _, *others = weights
        applying, stretch = self.applying, self.applying.stretch
        plan = applying.grid, (w1.shape[1], len(self.ps)), stretch, self.registers_of(stretch)
        launch = planned(kernels, self.device, "apply_kernel", *plan, **options)
        operands = self.addresses.table, self.gradients.table, *applying.tables, numbers, decays
        layers = self.row_means, self.norms, self.scales, w1, self.biases, *others
        launch((*operands, *layers, skipped), multipliers)

    def move_strips(
        self,
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        skipped: Tensor,
        multipliers: tuple[float, float],
        options: dict[str, Any],
    ) -> None:
        """The last two launches, of matrices in strips: the lines' part of the first layer, then
        the same.
        """
        w1, _, *others = weights
        integers, shapes = (w1.shape[1], len(self.ps)), self.moving.shapes
        strips, strip = self.applying_strips, self.applying_strips.strip
        plan = (self.line_blocks.count,), integers, LINES
        launch = planned(kernels_strips, self.device, "layers_kernel", *plan)
        tables = self.addresses.table, shapes, strips.table, *self.line_blocks.tables[1:]
        launch((*tables, self.norms, self.scales, w1, self.biases, skipped, self.layers))
        bounded = strips.grid, integers, strip, self.registers_of(strip)
        launch = planned(kernels_strips, self.device, "strip_apply_kernel", *bounded, **options)
        operands = self.addresses.table, self.gradients.table, shapes, *strips.tables
        layers = self.factors, self.norms, self.scales, w1, self.layers, *others
        launch((*operands, numbers, decays, *layers, skipped), multipliers)

    def weight_gradients(
        self,
        upstream: Sequence[Tensor],
        numbers: Tensor,
        decays: Tensor,
        weights: Sequence[Tensor],
        multipliers: tuple[float, float],
    ) -> Tensor:
        """``[tensors, 2178]``: of each tensor the gradients of W1's part for elements, transposed,
        b1, W2, transposed, b2, W3 and b3.
        """
        stretches = Stretches(self.layouts, BACKWARD, self.device)
        self.addresses.hold([*self.lines, *addresses_of(upstream)])
        partials = self.empty(max(stretches.blocks.count, 1), GRADIENTS)
        if stretches.blocks.count:
            plan = "learned_backward_kernel", stretches.grid, (len(self.ps),), BACKWARD
            launch = planned(kernels_backward, self.device, *plan, **self.constants)
            operands = self.addresses.table, self.gradients.table, *stretches.tables
            layers = self.norms, self.folded, self.biases, *weights[2:]
            inputs = (*operands, numbers, decays, self.row_means, *layers)
            launch((*inputs, partials), multipliers)
        gradients = self.empty(len(self.ps), GRADIENTS)
        grid = len(self.ps), cdiv(GRADIENTS, ADD_PARTIALS.size)
        launch = planned(
            kernels_backward, self.device, "add_partials_kernel", grid, (), ADD_PARTIALS
        )
        launch((partials, stretches.shapes, stretches.blocks.tables[1], gradients))
        return gradients

    def times(self, numbers: Tensor) -> Tensor:
        """``[tensors, 11]``: the features of time."""
        return time_features(numbers[:, 1]).float()


@constant_when_compiled
def precision() -> str:
    """Of the network's products: three of fp16, which together have about fp32's, or one of TF32
    where torch's own switch allows it.
    """
    return "tf32" if allows_tf32() else "fp16x3"


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
        multipliers = mlp.exp_mult, mlp.step_mult
        for batch, places, _ in self.batches:
            added = None if extra is None else extra[places]
            numbers = self.table[places]
            batch.move(numbers, self.decays, weights, added, step.skipped, multipliers)
