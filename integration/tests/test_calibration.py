"""Scores of predicted distributions, and how far they are right."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from fusewright.mixture_head import GaussianMixtureHead
from fusewright_models.data import LEVELS, LinearRegression, evaluate, mixture_crps
from fusewright_models.data.calibration import BINS
from scipy.integrate import quad


def head_of(scale="log_sigma"):
    return GaussianMixtureHead(8, 8, 4, scale=scale)


@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
@pytest.mark.parametrize("y", [-3.0, 0.1, 2.0, 30.0], ids=lambda y: f"y{y:g}")
def test_crps_is_the_integral_of_squared_distances(scale, y):
    head = head_of(scale)
    params = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    params[:, 1] *= 3.0

    def squared(x, above):
        at = torch.tensor(x, dtype=torch.float64)
        return (float(head.cdf(params, at)) - above) ** 2

    # Splits keep the step of the indicator, and the bulk, at the ends of a part.
    ends = sorted({-60.0, -12.0, y, 12.0, 60.0})
    parts = [
        quad(squared, low, high, args=(low >= y,), limit=200, epsabs=1e-13, epsrel=1e-13)
        for low, high in pairwise(ends)
    ]
    expected, error = np.sum(parts, axis=0)
    found = mixture_crps(head, params[None], torch.tensor([y], dtype=torch.float64))
    assert found.shape == (1,)
    assert found.dtype == torch.float64
    assert abs(float(found) - expected) <= error + 2**10 * np.finfo(float).eps * abs(expected)


def test_crps_without_spread_is_the_absolute_error():
    head = head_of()
    params = torch.tensor([[0.0, 1.5, -7.0], [-torch.inf, 9.0, 0.0]], dtype=torch.float64)
    found = mixture_crps(head, params, torch.tensor(4.0, dtype=torch.float64))
    # Of N(mu, sigma) it is the distance less sigma / sqrt(pi), far away.
    expected = 2.5 - math.exp(-7.0) / math.sqrt(math.pi)
    assert abs(float(found) - expected) <= 2**10 * np.finfo(float).eps * expected


class Told:
    """Predicts N(0, sigma^2) of every target."""

    def __init__(self, sigma):
        self.head = head_of()
        self.params = torch.zeros(4, 3)
        self.params[:, 2] = math.log(sigma)

    def __call__(self, x_context, y_context, x_target, *lengths):
        return self.params.expand(*x_target.shape[:2], 1, 4, 3)


class Noise(LinearRegression):
    """Targets that are N(0, 1) whatever the inputs."""

    def sample_sized(self, batch, context, targets):
        task = super().sample_sized(batch, context, targets)
        task.y_target.copy_(self.normal(batch, targets, 1))
        return task


@pytest.mark.parametrize("sigma", [1.0, 0.5, 2.0], ids=lambda sigma: f"sigma{sigma:g}")
def test_coverage_pit_and_crps_are_those_of_the_distribution_of_the_targets(sigma):
    batches, size, targets = 20, 50, 64
    found = evaluate(Told(sigma), Noise(seed=2), batches=batches, batch_size=size)
    count = batches * size * targets
    normal = torch.distributions.Normal(0.0, 1.0)
    bounds = sigma * normal.icdf(0.5 + torch.tensor(LEVELS, dtype=torch.float64) / 2)
    edges = sigma * normal.icdf(torch.arange(1, BINS, dtype=torch.float64) / BINS)
    below = torch.cat([torch.zeros(1), normal.cdf(edges), torch.ones(1)])
    for shares, expected in (
        (found.coverage, 2.0 * normal.cdf(bounds) - 1.0),
        (found.pit, below.diff()),
    ):
        error = (expected * (1.0 - expected) / count).sqrt()
        assert ((torch.tensor(shares) - expected).abs() <= 5.0 * error).all()
    # E |X - Y| - E |X - X'| / 2 of X of the prediction and Y of the targets; the score of a target
    # has a variance below the second moment of the difference.
    crps = math.sqrt(2.0 / math.pi) * math.sqrt(1.0 + sigma**2) - sigma / math.sqrt(math.pi)
    assert abs(found.crps - crps) <= 5.0 * math.sqrt((1.0 + sigma**2) / count)
    assert abs(sum(found.pit) - 1.0) <= BINS * np.finfo(float).eps
