r"""The learned optimizer of small_fc_lopt in plain torch: features, network, update, from the
statistics of ``common.statistics.reference``, which has R_i and C_i.

28 features of each element, each divided by its root mean square over the tensor,
f / sqrt(mean f^2 + 1e-5), then 11 of time, tanh(t / tau - 1), then those that the caller adds:

    g, x, m_i, v, m_i s, s, g R_i C_i, r_i, c_i, (r_i + 1e-8)^-1/2, (c_i + 1e-8)^-1/2, m_i R_i C_i

    s = (v + 1e-6)^-1/2

For tensors of fewer than two axes g has the factor (r_i + 1e-9)^-1/2 in place of R_i C_i, and m_i
(r_i + 1e-6)^-1/2.

    (d, e) = W3 relu(W2 relu(W1 f + b1) + b2) + b3        update = d exp(exp_mult e) step_mult

    x' = (1 - lr wd) (x - lr update)

t counts steps from 0, and decays are learned by an offset o: beta = 1 - (1 - beta0) exp(10 o),
clamped to [0, 1]. All of it can be differentiated in all operands, decays and statistics included.

Metz et al., Practical tradeoffs between memory, compute, and performance in learned optimizers,
arXiv 2203.11860; Janson et al., PyLO, arXiv 2506.10315.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..common.reference import decide, in_fp64, rounded
from ..common.sharding import Summing, summed_together
from ..common.statistics.members import StatisticsPart
from ..common.statistics.reference import (
    START_DECAYS,
    Decays,
    Statistics,
    Weights,
    element_features,
    normalised,
    perceptron,
)
from ..common.statistics.shards import advanced_member, features_of, take
from ..common.step import Step

Tensor = torch.Tensor
TIMESCALES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000)
# Of an element, and with those of time.
ELEMENT_FEATURES = 28
FEATURES = ELEMENT_FEATURES + len(TIMESCALES)


class Network(Protocol):
    """What a step needs of the network; ``UpdateMLP`` is one."""

    extra_features: int
    exp_mult: float
    step_mult: float

    def weights(self) -> Weights: ...
    def offsets(self) -> tuple[Tensor, Tensor, Tensor]: ...
    def decays(self) -> Decays: ...


def decays_of(momentum: Tensor, square: Tensor, factored: Tensor) -> Decays:
    """Decays from their learned offsets."""
    decays = []
    for start, offset in zip(START_DECAYS, (momentum, square, factored), strict=True):
        # In fp64, which a start near 1 needs.
        complement = numbers_on(offset.device, [1.0 - x for x in start])
        decays.append((1.0 - complement * torch.exp(10.0 * offset.double())).clamp(0.0, 1.0))
    return Decays(*decays)


def numbers_on(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """In fp64, without a copy that the host waits for."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.float64)
    return torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in numbers])


def time_features(t: Tensor) -> Tensor:
    """``[..., 11]`` of counts of steps that were taken before."""
    return torch.tanh(t.double()[..., None] / numbers_on(t.device, TIMESCALES) - 1.0)


def update_of(
    weights: Weights,
    p: Tensor,
    g: Tensor,
    statistics: Statistics,
    extra: Tensor | None,
    exp_mult: float,
    step_mult: float,
) -> Tensor:
    """``[*shape]``: what lr times is taken off p, from statistics that have seen g; ``extra`` is
    broadcast to ``[*shape, extra features]``.
    """
    features = normalised(element_features(p, g, statistics, velo=False))
    return update_by(weights, features, statistics.step, extra, exp_mult, step_mult)


def update_by(
    weights: Weights,
    features: Tensor,
    step: Tensor,
    extra: Tensor | None,
    exp_mult: float,
    step_mult: float,
) -> Tensor:
    """``update_of`` from features ``[*shape, 28]``, and the count of steps with this one."""
    dtype, shape = features.dtype, features.shape[:-1]
    inputs = [features, time_features(step - 1.0).to(dtype).expand(*shape, -1)]
    if extra is not None:
        inputs.append(extra.to(dtype).expand(*shape, -1))
    direction, magnitude = perceptron(torch.cat(inputs, -1), weights).unbind(-1)
    return direction * torch.exp(exp_mult * magnitude) * step_mult


class ReferencePart(StatisticsPart):
    """The members on one device that plain torch serves: whole ones one after the other, sums over
    shards together.
    """

    def move(self, step: Step) -> None:
        """Take the step, unless it is skipped."""
        mlp: Network = self.rules.network
        factor, decays = decide(step, self.rules.max_grad_norm, self.device), mlp.decays()
        summed_together(
            (member.mesh, self._moved(place, factor, decays, step.skipped))
            for place, member in enumerate(self.members)
        )

    def _moved(self, place: int, factor: Tensor, decays: Decays, skipped: Tensor) -> Summing[None]:
        """Move one member."""
        member, mlp = self.members[place], self.rules.network
        p, dtype = member.p, member.statistics.square.dtype
        lr, weight_decay = map(in_fp64, self.numbers[2 * member.group : 2 * member.group + 2])
        g = self.gradients[place].to(dtype) * (factor * member.sign).to(dtype)
        after = yield from advanced_member(member, g, decays)
        take(member.statistics, after, skipped)
        after = member.statistics
        features = yield from features_of(member, g, after, velo=False)
        extra = None if self.extra is None else self.extra[place]
        multipliers = mlp.exp_mult, mlp.step_mult
        update = update_by(mlp.weights(), features, after.step, extra, *multipliers)
        new_p = p.to(dtype) - rounded(lr, dtype) * update
        new_p = rounded(1.0 - lr * weight_decay, dtype) * new_p
        p.copy_(torch.where(skipped, p, new_p.to(p.dtype)))
