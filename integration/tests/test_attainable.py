"""What can be known of tasks whose parameters are not told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from fusewright_models.data import Digits, Size, attainable, make_sampler
from fusewright_models.data.attainable import attainable_log_likelihood
from torch.distributions import MultivariateNormal

from .test_data import covariance_of

NAMES = ("gp-rbf", "gp-matern", "gp-periodic", "blr")


def grid_of(name, task):
    """Every combination of parameters that the rule looks at, and the log of its prior weight."""
    like = torch.zeros((), dtype=torch.float64)
    if name == "blr":
        steps = attainable._midpoints(-4.0, 4.0, attainable.NOISE_POINTS, like)
        return [
            ({"sigma": (-1.0 + 0.3 * step).exp().reshape(1, 1, 1)}, -0.5 * step.square())
            for step in steps
        ]
    period = task.truth["period"].double()
    lengths = attainable._midpoints(0.1, 0.6, attainable.LENGTH_POINTS, like)
    scales = attainable._midpoints(0.1, 1.0, attainable.SCALE_POINTS, like)
    return [
        ({"length": a.reshape(1, 1, 1), "scale": b.reshape(1, 1, 1), "period": period}, like)
        for a in lengths
        for b in scales
    ]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_ratio_of_joint_densities_summed_over_parameters(
    name, monkeypatch, assert_same_but_for_rounding
):
    monkeypatch.setattr(attainable, "LENGTH_POINTS", 4)
    monkeypatch.setattr(attainable, "SCALE_POINTS", 3)
    monkeypatch.setattr(attainable, "NOISE_POINTS", 5)
    sampler = make_sampler(name, context_size=Size(12, 12), target_size=Size(1, 1))
    task = sampler.sample(3)
    x = torch.cat([task.x_context, task.x_target], dim=1).double()
    y = torch.cat([task.y_context, task.y_target], dim=1).double().squeeze(-1)
    joint, shown, condition = [], [], 1.0
    for truth, weight in grid_of(name, task):
        matrix = covariance_of(sampler, x, truth)
        for scores, n in ((joint, 13), (shown, 12)):
            density = MultivariateNormal(torch.zeros(n).double(), matrix[:, :n, :n])
            scores.append(weight + density.log_prob(y[:, :n]))
        condition = max(condition, float(torch.linalg.cond(matrix).max()))
    expected = torch.stack(joint).logsumexp(0) - torch.stack(shown).logsumexp(0)
    ours = attainable_log_likelihood(sampler, task)[:, 0, 0]
    assert_same_but_for_rounding([ours], [expected], condition)


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_a_finer_rule_says_the_same_and_the_oracle_knows_more(name, monkeypatch):
    def means():
        sampler = make_sampler(name)
        tasks = [sampler.sample(8) for _ in range(8)]
        scores = (partial(attainable_log_likelihood, sampler), sampler.reference_log_likelihood)
        return [
            torch.cat([task.mean_over_targets(score(task).double()) for task in tasks]).mean()
            for score in scores
        ]

    coarse, oracle = means()
    for points in ("LENGTH_POINTS", "SCALE_POINTS", "NOISE_POINTS"):
        monkeypatch.setattr(attainable, points, 2 * getattr(attainable, points))
    fine, _ = means()
    assert coarse < oracle
    # The rule's own error is small beside what is not known.
    assert abs(fine - coarse) < (oracle - coarse) / 20.0


def test_what_has_no_prior_or_has_lengths_is_refused():
    digits = Digits()
    with pytest.raises(
        TypeError, match="wanted a sampler with a prior over parameters; got Digits"
    ):
        attainable_log_likelihood(digits, digits.sample(1))
    sampler = make_sampler("blr")
    task = replace(sampler.sample(2), context_lengths=torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="wanted tasks of one size; got some with lengths"):
        attainable_log_likelihood(sampler, task)
