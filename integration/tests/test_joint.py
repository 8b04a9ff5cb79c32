"""Draws of all targets together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fusewright_models import TransformerNPRegressor
from fusewright_models.models.transformer_np import joint_log_likelihood, sample_jointly


@pytest.fixture(params=[1, 2], ids=["one-output", "two-outputs"])
def case(request, small, rows):
    torch.manual_seed(4)
    sizes = dict(dtype=torch.float64, y_width=request.param)
    return small(**sizes), rows(3, 6, 5, **sizes)


def drawn(case, permuted, seed=0):
    model, (x_context, y_context, x_target, _) = case
    generator = torch.Generator().manual_seed(seed)
    rows = x_context, y_context, x_target
    return sample_jointly(model, *rows, permuted=permuted, generator=generator)


@pytest.mark.parametrize("permuted", [False, True], ids=["given", "permuted"])
def test_density_of_a_path_is_the_product_of_the_conditional_ones(
    case, permuted, assert_same_but_for_rounding
):
    model, (x_context, y_context, x_target, _) = case
    y, log_p, order = drawn(case, permuted)
    for task in range(3):
        assert order[task].sort().values.tolist() == list(range(5))
        x, known, total = x_context[task : task + 1], y_context[task : task + 1], 0.0
        for number in order[task].tolist():
            target, value = (rows[task : task + 1, [number]] for rows in (x_target, y))
            total = total + model.log_likelihood(x, known, target, value).sum()
            x, known = torch.cat([x, target], 1), torch.cat([known, value], 1)
        assert_same_but_for_rounding([log_p[task]], [total.detach()])
    rows = x_context, y_context, x_target, y
    again = joint_log_likelihood(model, *rows, order=order).detach()
    assert_same_but_for_rounding([again], [log_p])
    plain = joint_log_likelihood(model, *rows).detach()
    if permuted:
        assert len({tuple(each) for each in order.tolist()}) > 1
        assert not torch.equal(plain, again)
    else:
        assert torch.equal(plain, again)


def test_first_target_of_a_path_is_drawn_as_on_its_own(case):
    model, (x_context, y_context, x_target, _) = case
    y = drawn(case, permuted=False).y
    generator = torch.Generator().manual_seed(0)
    alone = model.predict(x_context, y_context, x_target[:, :1], generator=generator).sample
    assert torch.equal(y[:, :1], alone)
    assert torch.equal(y, drawn(case, permuted=False).y)
    assert not torch.equal(y, drawn(case, permuted=False, seed=1).y)


def test_every_target_has_the_distribution_that_it_is_given(small, rows):
    model = small(dtype=torch.float64)
    x_context, y_context, x_target, _ = rows(400, 4, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    y = sample_jointly(model, x_context, y_context, x_target, generator=generator).y
    for n in range(3):
        x = torch.cat([x_context, x_target[:, :n]], 1)
        known = torch.cat([y_context, y[:, :n]], 1)
        with torch.no_grad():
            params = model(x, known, x_target[:, n : n + 1])
        position = model.head.cdf(params, y[:, n : n + 1])
        # Uniform of 400 tasks: mean 1/2 and variance 1/12, within five standard errors.
        assert (position.mean() - 0.5).abs() <= 5.0 / (12.0 * 400.0) ** 0.5


@pytest.mark.parametrize("permuted", [False, True], ids=["given", "permuted"])
def test_regressor_draws_rows_together(small, permuted):
    model = small(x_width=2)
    x = np.random.default_rng(0).normal(size=(12, 2))
    regressor = TransformerNPRegressor(model, scaling="rows").fit(x, 40.0 + 3.0 * x[:, 0])
    chosen = dict(joint=True, permuted=permuted, random_state=1)
    draws = regressor.sample(x[:4], 500, **chosen)
    assert draws.shape == (4, 500)
    assert np.array_equal(draws, regressor.sample(x[:4], 500, **chosen))
    mean, deviation = regressor.predict(x[:4], return_std=True)
    if not permuted:
        # Nothing was drawn before the first one.
        assert abs(draws[0].mean() - mean[0]) <= 5.0 * deviation[0] / 500**0.5
    assert regressor.sample(x[:1], 3, **chosen).shape == (1, 3)
