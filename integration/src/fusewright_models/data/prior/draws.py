"""Choices that every task of a batch makes on its own, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..task import Sampler


def chance(draw: Sampler, probability: float, *shape: int) -> Tensor:
    """Whether something happens, bool."""
    return draw.uniform(0.0, 1.0, *shape) < probability


def choice(draw: Sampler, weights: Sequence[float], *shape: int) -> Tensor:
    """A number from 0 on, int64, each as often as its weight says."""
    # Compared with numbers of the host: a tensor of them would have to be copied.
    u = draw.uniform(0.0, sum(weights), *shape)
    bounds = [*accumulate(weights)][:-1]
    return sum((u >= bound for bound in bounds), torch.zeros_like(u)).long()


def one_of(draw: Sampler, values: Sequence[int], *shape: int) -> Tensor:
    """One of a few numbers, int64, all alike."""
    number = choice(draw, [1.0] * len(values), *shape)
    found = torch.zeros_like(number)
    for place, value in enumerate(values):
        found = torch.where(number == place, value, found)
    return found


def log_uniform(draw: Sampler, low: float, high: float, *shape: int) -> Tensor:
    """exp of U[log low, log high)."""
    return draw.uniform(math.log(low), math.log(high), *shape).exp()


def mean_square(draw: Sampler, freedom: Tensor, most: int, *shape: int) -> Tensor:
    """Chi squared of so many degrees of freedom over their number: the mean of as many squares of
    normal numbers.

    Args:
        draw: the sampler.
        freedom: int64, of shape ``shape`` or one that broadcasts with it.
        most: the largest ``freedom``.
        shape: of the result.
    """
    squares = draw.normal(*shape, most).square()
    counts = torch.arange(most, device=squares.device) < freedom.unsqueeze(-1)
    sums = torch.where(counts, squares, 0.0).sum(-1)
    # A normal number may be 0, and what is divided by the mean be infinite.
    return sums.clamp(min=torch.finfo(sums.dtype).tiny) / freedom
