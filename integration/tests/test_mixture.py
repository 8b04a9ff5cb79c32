from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fusewright_models import (
    mixture_log_likelihood,
    mixture_mean,
    mixture_sample,
    mixture_variance,
)
from torch.distributions import Categorical, MixtureSameFamily, Normal


def distribution(params: torch.Tensor, scale: str) -> MixtureSameFamily:
    logits, mean, raw = params.unbind(-1)
    sigma = raw.exp() if scale == "log_sigma" else F.softplus(raw) + 1e-3
    return MixtureSameFamily(Categorical(logits=logits), Normal(mean, sigma))


@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
def test_likelihood_and_moments_are_those_of_torch_distributions(scale):
    params = torch.randn(5, 7, 4, 3, dtype=torch.float64)
    y = torch.randn(5, 7, dtype=torch.float64)
    expected = distribution(params, scale)
    torch.testing.assert_close(mixture_log_likelihood(params, y, scale=scale), expected.log_prob(y))
    torch.testing.assert_close(mixture_mean(params, scale=scale), expected.mean)
    torch.testing.assert_close(mixture_variance(params, scale=scale), expected.variance)


def test_gradients_are_responsibilities_times_residuals():
    params = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(6, dtype=torch.float64, requires_grad=True)
    log_p = mixture_log_likelihood(params, y)
    dparams, dy = torch.autograd.grad(log_p.sum(), (params, y))

    logits, mean, log_sigma = params.detach().unbind(-1)
    weight, sigma = logits.softmax(-1), log_sigma.exp()
    z = (y.detach().unsqueeze(-1) - mean) / sigma
    density = weight * torch.exp(-0.5 * z.square()) / (sigma * (2 * torch.pi) ** 0.5)
    r = density / density.sum(-1, keepdim=True)
    expected = torch.stack([r - weight, r * z / sigma, r * (z.square() - 1.0)], dim=-1)
    torch.testing.assert_close(dparams, expected)
    torch.testing.assert_close(dy, -(r * z / sigma).sum(-1))


def test_likelihood_of_a_distant_point_under_narrow_components_is_finite():
    params = torch.zeros(1, 3, 3)
    params[..., 2] = -50.0
    params.requires_grad_()
    log_p = mixture_log_likelihood(params, torch.tensor([1e6]))
    log_p.sum().backward()
    assert log_p.isfinite().all()
    assert params.grad.isfinite().all()


def test_nan_observation_gives_nan_in_its_own_row_only():
    params = torch.randn(3, 4, 3)
    log_p = mixture_log_likelihood(params, torch.tensor([0.0, torch.nan, 1.0]))
    assert log_p.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("scale", ["log_sigma", "softplus"])
def test_samples_have_the_mean_and_variance_of_the_mixture(scale):
    params = torch.randn(4, 3, dtype=torch.float64)
    draws = 100_000
    sample = mixture_sample(params.expand(draws, 4, 3), scale=scale)
    mean, variance = mixture_mean(params, scale=scale), mixture_variance(params, scale=scale)
    squared = (sample - mean).square()
    # Four standard errors of the Monte-Carlo estimate.
    assert (sample.mean() - mean).abs() <= 4.0 * (variance / draws) ** 0.5
    assert (squared.mean() - variance).abs() <= 4.0 * squared.std() / draws**0.5


def test_low_precision_parameters_are_computed_in_fp32():
    params = torch.randn(5, 4, 3).bfloat16()
    y = torch.randn(5)
    log_p = mixture_log_likelihood(params, y)
    assert log_p.dtype == torch.float32
    assert torch.equal(log_p, mixture_log_likelihood(params.float(), y))


@pytest.mark.parametrize(
    ("params", "y", "message"),
    [
        ((5, 4, 2), (5,), r"\[\.\.\., K, 3\] with K >= 1; got \[5, 4, 2\]"),
        ((5, 0, 3), (5,), r"\[\.\.\., K, 3\] with K >= 1; got \[5, 0, 3\]"),
        ((5, 4, 3), (6,), "with y \\[6\\].*got \\[5, 4, 3\\]"),
    ],
    ids=["two-parameters", "no-component", "rows-differ"],
)
def test_wrong_shapes_are_refused(params, y, message):
    with pytest.raises(ValueError, match=message):
        mixture_log_likelihood(torch.zeros(params), torch.zeros(y))


def test_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"scale must be one of .*got 'variance'"):
        mixture_mean(torch.zeros(2, 3), scale="variance")
