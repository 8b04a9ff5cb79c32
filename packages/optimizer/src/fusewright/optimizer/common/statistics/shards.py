"""Steps of parameters of which each process may have some rows: what is a mean over the whole
tensor is yielded as sums over these rows, and comes back as sums over all of them. A parameter that
a process has whole yields nothing.
"""

from __future__ import annotations

import torch

from ..sharding import Summing
from .members import Member
from .reference import (
    Decays,
    Statistics,
    advanced,
    element_features,
    factored_axes,
    lines,
    normalised,
    squares,
)

Tensor = torch.Tensor


def advanced_member(member: Member, g: Tensor, decays: Decays) -> Summing[Statistics]:
    """``advanced``."""
    shape, axes = member.shape, factored_axes(member.shape)
    if not member.is_sharded or axes is None or not shape.numel():
        return advanced(member.statistics, g, decays)
    second, longest = axes
    g2 = squares(g.to(member.statistics.square.dtype))
    sums = {axis: g2.sum(axis) for axis in (longest, second)}
    if 0 in sums:
        (sums[0],) = yield [sums[0]]
    means = sums[longest] / shape[longest], sums[second] / shape[second]
    return advanced(member.statistics, g, decays, means)


def features_of(
    member: Member, g: Tensor, statistics: Statistics, *, velo: bool
) -> Summing[Tensor]:
    """``element_features``, normalised."""
    p, shape = member.p, member.shape
    if not member.is_sharded:
        return normalised(element_features(p, g, statistics, velo=velo))
    found, mean = lines(shape, statistics, velo=velo), None
    if found is not None and found[2] == 1:
        (total,) = yield [found[0].sum(1, keepdim=True)]
        mean = total / shape[0]

    def features() -> Tensor:
        return element_features(p, g, statistics, velo=velo, shape=shape, mean=mean)

    # Not kept while others are added: they take 28 times the memory of g.
    (total,) = yield [features().square().sum(tuple(range(p.ndim)))]
    return normalised(features(), total / max(shape.numel(), 1))


def take(before: Statistics, after: Statistics, skipped: Tensor) -> None:
    """Move the statistics, unless the step is skipped."""
    for old, new in zip(before, after, strict=True):
        old.copy_(torch.where(skipped, old, new))
