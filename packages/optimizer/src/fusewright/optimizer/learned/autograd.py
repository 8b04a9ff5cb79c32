"""The learned optimizer's updates by kernels as a function of the network, for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.placement import laid_out_like
from ..common.statistics.reference import Statistics, new_statistics
from . import launch
from .reference import ELEMENT_FEATURES, FEATURES, Network, decays_of

Tensor = torch.Tensor


def by_kernels(
    mlp: Network,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    statistics: Sequence[Statistics],
    extra: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Statistics]]:
    plan = Plan(len(params), mlp.exp_mult, mlp.step_mult)
    added = None if extra is None else torch.stack([x.float() for x in extra])
    constants = (*params, *gradients, *mlp.offsets(), *(x for its in statistics for x in its))
    outputs = Updates.apply(plan, added, *mlp.weights(), *constants)
    updates, flat = outputs[: len(params)], outputs[len(params) :]
    fields = len(Statistics._fields)
    after = [Statistics(*flat[at : at + fields]) for at in range(0, len(flat), fields)]
    return list(updates), after


class Plan:
    """One call's launches and their operands, below all transforms, where tensors have memory."""

    batch: Any
    gradients: list[Tensor]
    numbers: Tensor
    decays: Tensor

    def __init__(self, count: int, exp_mult: float, step_mult: float) -> None:
        self.count, self.multipliers = count, (exp_mult, step_mult)

    def updates(
        self, extra: Tensor | None, weights: list[Tensor], constants: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The updates, and the statistics after the step."""
        count, fields = self.count, len(Statistics._fields)
        params, gradients = constants[:count], constants[count : 2 * count]
        offsets, before = constants[2 * count : 2 * count + 3], constants[2 * count + 3 :]
        after = [
            copy_of(before[fields * place : fields * (place + 1)], p)
            for place, p in enumerate(params)
        ]
        updates = [torch.empty_like(p, dtype=torch.float32) for p in params]
        self.gradients = [laid_out_like(g, p) for g, p in zip(gradients, params, strict=True)]
        batch = launch.LearnedBatch(params, after, gradients[0].dtype, updates)
        batch.point(self.gradients)
        decays = torch.cat(decays_of(*offsets))
        decays = torch.cat((decays, 1.0 - decays)).float()
        times = torch.stack([some.step for some in after])
        ones, zeros = torch.ones_like(times), torch.zeros_like(times)
        numbers = torch.stack((ones, times, zeros, ones), 1)
        skipped = torch.zeros((), dtype=torch.bool, device=batch.device)
        batch.move(numbers, decays, weights, extra, skipped, self.multipliers)
        for some in after:
            some.step.add_(1.0)
        # Outputs refer to this plan: if it referred to them, only the collector would free both.
        # autograd saves what a backward pass reads again; the tables have its addresses.
        batch.updates, batch.statistics = None, ()
        self.batch, self.numbers, self.decays = batch, numbers, decays
        return (*updates, *(x for some in after for x in some))

    def weight_gradients(
        self, extra: Tensor | None, weights: list[Tensor], upstream: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The gradients of weights and biases, and of the extra features where there are any."""
        batch = self.batch
        upstream = [laid_out_like(x, p) for x, p in zip(upstream, batch.ps, strict=True)]
        operands = upstream, self.numbers, self.decays, weights
        gradients = batch.weight_gradients(*operands, self.multipliers)
        of_w1, of_b1, of_w2, of_b2, of_w3, of_b3 = gradients.split(launch.GRADIENT_SIZES, 1)
        first = [of_w1.sum(0).view(32, 32)[:ELEMENT_FEATURES].t()]
        # Features of whole tensors are multiplied by the gradients of their first layers' biases.
        first.append(of_b1.t() @ batch.times(self.numbers))
        of_extra = []
        if extra is not None:
            first.append(of_b1.t() @ extra)
            of_extra.append(of_b1 @ weights[0][:, FEATURES:])
        return (
            torch.cat(first, 1),
            of_b1.sum(0),
            of_w2.sum(0).view(32, 32).t().contiguous(),
            of_b2.sum(0),
            of_w3.sum(0).view(2, 32),
            of_b3.sum(0),
            *of_extra,
        )


def copy_of(statistics: Sequence[Tensor], p: Tensor) -> Statistics:
    """A copy in the order of p's memory."""
    copies = new_statistics(p)
    for new, old in zip(copies, statistics, strict=True):
        new.copy_(old)
    return copies


class Updates(torch.autograd.Function):
    """Updates and statistics, differentiable in weights, biases and extra features."""

    @staticmethod
    def forward(plan: Plan, extra: Tensor | None, *operands: Tensor) -> tuple[Tensor, ...]:
        weights = [x.contiguous() for x in operands[:6]]
        return plan.updates(extra, weights, operands[6:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        plan, *operands = inputs
        ctx.plan = plan
        ctx.constants = len(operands) - 7
        statistics = output[plan.count :]
        ctx.mark_non_differentiable(*statistics)
        # Statistics are read again, too: autograd raises where one was overwritten in between.
        read = [x for place, x in enumerate(statistics) if place % len(Statistics._fields)]
        ctx.save_for_backward(*operands[: 7 + 2 * plan.count], *read)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple:
        plan = ctx.plan
        extra, *weights = ctx.saved_tensors[:7]
        gradients = WeightGradients.apply(plan, extra, *weights, *upstream[: plan.count])
        of_extra = None if extra is None else gradients[6]
        return (None, of_extra, *gradients[:6], *[None] * ctx.constants)


class WeightGradients(torch.autograd.Function):
    """The gradients of ``Updates``, as a function of its own, so that transforms unwrap its
    operands.
    """

    @staticmethod
    def forward(plan: Plan, extra: Tensor | None, *operands: Tensor) -> tuple[Tensor, ...]:
        weights = [x.contiguous() for x in operands[:6]]
        return plan.weight_gradients(extra, weights, operands[6:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple:
        raise RuntimeError(
            "the kernels of learned_update give first derivatives only; "
            'backend="reference" gives all'
        )
