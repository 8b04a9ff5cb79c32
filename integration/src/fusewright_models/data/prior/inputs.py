"""Inputs of tasks: one to ten columns, as tables have them.

    x = sqrt(1 - r) e + sqrt(r) F c + s m,    e, c ~ N(0, I),   r, s from 0 on

with three factors c that columns share, F of columns of norm 1, and m the centre of one of four
groups. Each column then is left normal, or becomes uniform, skewed, heavy-tailed or one of few
values; its sign is drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..task import Sampler
from .draws import chance, choice, log_uniform
from .scales import standardised

FACTORS, GROUPS = 3, 4
# Of tasks: those whose columns share factors, those that have groups, those whose columns are all
# of one kind.
FACTORED, GROUPED, ALIKE = 0.6, 0.25, 0.5
# normal, uniform, skewed, heavy-tailed, few values
KINDS = (0.35, 0.3, 0.12, 0.08, 0.15)
# Exponents stay below it.
REACH = 4.0


def draw_inputs(draw: Sampler, batch: int, points: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns ``[B, P, width]`` of mean 0 and variance 1 over the points of a task, 0 where a task
    has none, and which it has, ``[B, 1, width]``, bool: one or more, at any places.
    """
    count = draw.uniform(1.0, width + 1.0, batch, 1, 1).floor()
    active = draw.uniform(0.0, 1.0, batch, 1, width).argsort(2) < count
    x = _in_groups(draw, _correlated(draw, batch, points, width))
    x = standardised(_shaped(draw, x)) * _signs(draw, batch, 1, width)
    return torch.where(active, x, 0.0), active


def _correlated(draw: Sampler, batch: int, points: int, width: int) -> Tensor:
    own = draw.normal(batch, points, width)
    directions = torch.nn.functional.normalize(draw.normal(batch, FACTORS, width), dim=1)
    shared = draw.normal(batch, points, FACTORS) @ directions
    most = draw.uniform(0.0, 1.0, batch, 1, 1).sqrt() * chance(draw, FACTORED, batch, 1, 1)
    share = most * draw.uniform(0.5, 1.0, batch, 1, width)
    return (1.0 - share).sqrt() * own + share.sqrt() * shared


def _in_groups(draw: Sampler, x: Tensor) -> Tensor:
    batch, points, width = x.shape
    member = draw.uniform(0.0, GROUPS, batch, points, 1).long().clamp(max=GROUPS - 1)
    centres = draw.normal(batch, GROUPS, width).gather(1, member.expand(-1, -1, width))
    spread = draw.uniform(0.0, 3.0, batch, 1, 1) * chance(draw, GROUPED, batch, 1, 1)
    return (x + spread * centres) / (1.0 + spread.square()).sqrt()


def _shaped(draw: Sampler, x: Tensor) -> Tensor:
    """Normal columns as those of the kind that each is to be."""
    batch, _, width = x.shape
    kind = torch.where(
        chance(draw, ALIKE, batch, 1, 1),
        choice(draw, KINDS, batch, 1, 1),
        choice(draw, KINDS, batch, 1, width),
    )
    strength = draw.uniform(0.3, 1.2, batch, 1, width)
    bounded = (strength * x).clamp(-REACH, REACH)
    density = log_uniform(draw, 0.3, 6.0, batch, 1, width)
    steps = (density * x + draw.uniform(0.0, 1.0, batch, 1, width)).round()
    others = (x / math.sqrt(2.0)).erf(), bounded.exp(), (1.5 * bounded).sinh(), steps
    for number, other in enumerate(others, 1):
        x = torch.where(kind == number, other, x)
    return x


def _signs(draw: Sampler, *shape: int) -> Tensor:
    return torch.where(chance(draw, 0.5, *shape), 1.0, -1.0)
