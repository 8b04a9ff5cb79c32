"""Functions of the columns of a task, one for each task of a batch.

    waves      sum_h w_h cos(omega_h x + b_h)            a Gaussian process, by its spectral density
    linear     w x
    trees      sum_t leaf_t[which side of its thresholds each of up to four columns lies]
    network    w act(V act(U x + b) + c)

omega_h = xi s / l with xi ~ N(0, I) and s = 1 of a squared exponential kernel, (chi^2_n / n)^(-1/2)
of a Matern one of nu = n / 2, and (chi^2_n / n)^(1/2) of a rational quadratic one of alpha = n / 2.
A wave reads one column, two, three or all of those that matter: sums and products of kernels of
these. A periodic kernel's are multiples of one frequency, in one column each. Of a Gaussian process
the covariances are those of 96 waves and not exact: a factor of the exact matrix would take a
hundred times as long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..task import Sampler
from .draws import chance, choice, log_uniform, mean_square, one_of

WAVES, TREES, DEPTH, HIDDEN = 96, 24, 4, 24
# Of the columns of a task, those that matter to a function, at least.
FEWEST = 0.3
# squared exponential, Matern, rational quadratic; and, of all tasks, periodic ones
KERNELS, PERIODIC = (0.35, 0.45, 0.2), 0.08
FREEDOM = (1, 3, 5)
# Columns that a wave reads: one, two, three, all.
ORDERS = (0.25, 0.2, 0.15, 0.4)
# Length scales in standard deviations of a column, and by the root of their number.
LENGTHS = 0.3, 6.0


def draw_functions(draw: Sampler, x: Tensor, active: Tensor) -> Tensor:
    """Of ``x [B, P, d]`` and the columns that tasks have, ``[B, 1, d]``: two sums of waves, two
    linear functions, one of trees and one network, ``[B, P, 6]``.
    """
    made = waves, waves, linear, linear, trees, network
    return torch.stack([make(draw, x, weights_of(draw, active)) for make in made], dim=-1)


# How often a task takes each of them.
SHARES = (0.25, 0.15, 0.12, 0.12, 0.16, 0.2)


def weights_of(draw: Sampler, active: Tensor) -> Tensor:
    """How much each column matters to a function, ``[B, 1, d]``: 0 for some."""
    batch, _, width = active.shape
    place = torch.where(active, draw.uniform(0.0, 1.0, batch, 1, width), -1.0)
    some = place > draw.uniform(0.0, 1.0 - FEWEST, batch, 1, 1)
    # One at least.
    matters = active & (some | (place == place.amax(2, keepdim=True)))
    spread = draw.uniform(0.0, 1.2, batch, 1, 1)
    return torch.where(matters, (spread * draw.normal(batch, 1, width)).exp(), 0.0)


def waves(draw: Sampler, x: Tensor, weights: Tensor) -> Tensor:
    batch, _, width = x.shape
    periodic = chance(draw, PERIODIC, batch, 1, 1)
    read = weights * _subsets(draw, weights, periodic)
    direction = draw.normal(batch, WAVES, width)
    freedom = one_of(draw, FREEDOM, batch, 1)
    square = mean_square(draw, freedom, max(FREEDOM), batch, WAVES).unsqueeze(-1)
    kernel = choice(draw, KERNELS, batch, 1, 1)
    stretch = torch.where(kernel == 1, square.rsqrt(), torch.where(kernel == 2, square.sqrt(), 1.0))
    norm = read.square().sum(2, keepdim=True).mean(1, keepdim=True).sqrt()
    length = log_uniform(draw, *LENGTHS, batch, 1, 1)
    omega = read * direction * stretch / (length * norm)
    multiple = 1.0 + (1.5 * direction.abs()).floor()
    turn = 2.0 * math.pi / draw.uniform(1.0, 6.0, batch, 1, 1)
    omega = torch.where(periodic, (read > 0.0) * multiple * turn, omega)
    phase = draw.uniform(0.0, 2.0 * math.pi, batch, 1, WAVES)
    # Some columns' waves are higher than others'.
    height = ((read > 0.0) * draw.normal(batch, 1, width).exp()).sum(2)
    amplitude = draw.normal(batch, WAVES) * height
    return ((x @ omega.mT + phase).cos() @ amplitude.unsqueeze(-1)).squeeze(-1)


def _subsets(draw: Sampler, weights: Tensor, single: Tensor) -> Tensor:
    """Which columns each wave reads, ``[B, WAVES, d]``, of those with a weight."""
    batch, _, width = weights.shape
    order = choice(draw, ORDERS, batch, 1, 1)
    order = torch.where(order == len(ORDERS) - 1, width - 1, order).clamp(max=width - 1)
    order = torch.where(single, 0, order).expand(-1, WAVES, 1)
    place = draw.uniform(0.0, 1.0, batch, WAVES, width).masked_fill(weights == 0.0, -1.0)
    bound = place.sort(dim=2, descending=True).values.gather(2, order)
    return (place >= bound) & (weights > 0.0)


def linear(draw: Sampler, x: Tensor, weights: Tensor) -> Tensor:
    slope = weights * draw.normal(*weights.shape)
    return (x @ slope.mT).squeeze(-1)


def trees(draw: Sampler, x: Tensor, weights: Tensor) -> Tensor:
    """Trees that compare the same column on all branches of a level, at a value of some point."""
    batch, points, width = x.shape
    place = draw.uniform(0.0, 1.0, batch, TREES * DEPTH, width).masked_fill(weights == 0.0, -1.0)
    column = place.argmax(2).unsqueeze(1)
    values = x.gather(2, column.expand(-1, points, -1))
    point = draw.uniform(0.0, points, batch, 1, TREES * DEPTH).long().clamp(max=points - 1)
    above = (values > values.gather(1, point)).unflatten(2, (TREES, DEPTH))
    level = torch.arange(DEPTH, device=x.device)
    used = level < one_of(draw, range(1, DEPTH + 1), batch, 1, 1, 1)
    leaf = ((above & used) * 2**level).sum(3)
    heights = draw.normal(batch, 2**DEPTH, TREES).gather(1, leaf)
    counts = torch.arange(TREES, device=x.device) < one_of(draw, (1, 2, 4, 8, TREES), batch, 1, 1)
    return (heights * counts).sum(2)


def network(draw: Sampler, x: Tensor, weights: Tensor) -> Tensor:
    batch, _, width = x.shape
    kind = choice(draw, (1.0, 1.0, 1.0), batch, 1, 1)
    gain = log_uniform(draw, 0.5, 4.0, batch, 1, 1)
    norm = weights.square().sum(2, keepdim=True).sqrt()
    into = draw.normal(batch, HIDDEN, width) * weights * gain / norm
    hidden = _activated(x @ into.mT + draw.normal(batch, 1, HIDDEN), kind)
    between = draw.normal(batch, HIDDEN, HIDDEN) * gain / math.sqrt(HIDDEN)
    hidden = _activated(hidden @ between.mT + draw.normal(batch, 1, HIDDEN), kind)
    return (hidden @ draw.normal(batch, HIDDEN, 1)).squeeze(-1)


def _activated(x: Tensor, kind: Tensor) -> Tensor:
    """tanh, the positive part, or the sine."""
    return torch.where(kind == 0, x.tanh(), torch.where(kind == 1, x.relu(), x.sin()))
