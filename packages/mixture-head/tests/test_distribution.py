"""Moments, distribution function, quantiles and draws, and the module that has them all."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fusewright.mixture_head import (
    GaussianMixtureHead,
    mixture_cdf,
    mixture_log_likelihood,
    mixture_mean,
    mixture_quantiles,
    mixture_sample,
    mixture_variance,
)
from torch.distributions import Categorical, MixtureSameFamily, Normal

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
LEVELS = (0.001, 0.1, 0.5, 0.9, 0.999)


def distribution(params: torch.Tensor, scale: str) -> MixtureSameFamily:
    logits, mean, raw = params.unbind(-1)
    sigma = raw.exp() if scale == "log_sigma" else torch.nn.functional.softplus(raw) + 1e-3
    return MixtureSameFamily(Categorical(logits=logits), Normal(mean, sigma))


def close(found: torch.Tensor, expected: torch.Tensor, places: int = 64) -> bool:
    bound = places * torch.finfo(found.dtype).eps * expected.abs().max()
    return bool((found - expected).abs().max() <= bound)


def test_moments_and_distribution_function_are_those_of_torch_distributions(scale, draw_mixtures):
    params, y = draw_mixtures((5, 7, 4), F64, y_dtype=F64)
    expected = distribution(params, scale)
    assert close(mixture_mean(params, scale=scale), expected.mean)
    assert close(mixture_variance(params, scale=scale), expected.variance)
    assert close(mixture_cdf(params, y, scale=scale), expected.cdf(y))


def test_distribution_function_broadcasts_over_points(draw_mixtures):
    params, _ = draw_mixtures((5, 4), F64)
    grid = torch.linspace(-30.0, 30.0, 9, dtype=F64)[:, None]
    found = mixture_cdf(params, grid)
    assert found.shape == (9, 5)
    assert (found.diff(dim=0) >= 0).all()
    assert torch.equal(found[3], mixture_cdf(params, grid[3].expand(5)))


def test_density_is_the_slope_of_the_distribution_function(scale, draw_mixtures):
    params, y = draw_mixtures((5, 4), F64, y_dtype=F64)
    leaf = y.requires_grad_()
    (slope,) = torch.autograd.grad(mixture_cdf(params, leaf, scale=scale).sum(), leaf)
    assert close(slope, mixture_log_likelihood(params, y.detach(), scale=scale).exp())


@pytest.mark.parametrize("dtype", [F32, F64])
def test_quantiles_invert_the_distribution_function(scale, dtype, draw_mixtures):
    params, _ = draw_mixtures((5, 7, 4), dtype)
    found = mixture_quantiles(params, LEVELS, scale=scale)
    assert found.shape == (5, 7, len(LEVELS))
    assert found.dtype == dtype
    assert (found.diff(dim=-1) > 0).all()
    listed = torch.tensor(LEVELS, dtype=dtype)
    assert torch.equal(found, mixture_quantiles(params, listed, scale=scale))
    level = mixture_cdf(params[:, :, None], found, scale=scale)
    # A quantile is exact to its last places, each of which is worth the density in probability.
    density = mixture_log_likelihood(
        params[:, :, None].expand(5, 7, len(LEVELS), 4, 3), found, scale=scale
    ).exp()
    eps = torch.finfo(dtype).eps
    bound = 4 * eps * (1.0 + density * (1.0 + found.abs()))
    assert ((level - listed).abs() <= bound).all()


def test_quantiles_of_one_component_are_those_of_the_normal_distribution(scale, draw_mixtures):
    params, _ = draw_mixtures((6, 1), F64)
    levels = torch.tensor(LEVELS, dtype=F64)
    mean, sigma = mixture_mean(params, scale=scale), mixture_variance(params, scale=scale).sqrt()
    expected = mean[:, None] + sigma[:, None] * torch.special.ndtri(levels)
    assert close(mixture_quantiles(params, levels, scale=scale), expected)


def test_quantiles_at_and_beyond_the_ends(draw_mixtures):
    params, _ = draw_mixtures((2, 3), F32)
    levels = [0.0, 1.0, 0.5, 1.5, -0.5, torch.inf, torch.nan]
    found = mixture_quantiles(params.requires_grad_(), levels)
    assert found[:, 0].tolist() == [-torch.inf] * 2
    assert found[:, 1].tolist() == [torch.inf] * 2
    assert found[:, 2].isfinite().all()
    assert found[:, 3:].isnan().all()
    (dparams,) = torch.autograd.grad(found[:, :3].nan_to_num(posinf=0).sum(), params)
    assert dparams.isfinite().all()


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("gap", [1e8, 1e12, 1e30, 3e38])
def test_distant_component_costs_quantiles_no_precision(gap, dtype):
    logits = torch.tensor([0.9, 0.1], dtype=F64).log()
    means = torch.tensor([[0.0, gap], [-gap, 1.0]], dtype=F64)
    params = torch.stack([logits.expand(2, 2), means, torch.zeros(2, 2, dtype=F64)], -1)
    levels = torch.tensor([0.05, 0.5, 0.85], dtype=F64)
    found = mixture_quantiles(params.to(dtype), levels.to(dtype))
    # The lower component reaches a level at its own quantile of level / 0.9, the other one what is
    # above 0.9 at that of (level - 0.9) / 0.1.
    assert close(found[0], torch.special.ndtri(levels / 0.9))
    assert close(mixture_quantiles(params.to(dtype), [0.95])[1], torch.ones(1, dtype=F64))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_quantiles_are_the_first_numbers_that_reach_their_levels(scale, dtype, draw_mixtures):
    params, _ = draw_mixtures((40, 5), dtype)
    levels = torch.tensor(LEVELS, dtype=dtype)
    found = mixture_quantiles(params, levels, scale=scale)
    before = found.nextafter(torch.tensor(-torch.inf, dtype=dtype))
    assert (mixture_cdf(params[:, None], found, scale=scale) >= levels).all()
    assert (mixture_cdf(params[:, None], before, scale=scale) < levels).all()


@pytest.mark.parametrize("where", ["logit", "all logits", "mean", "scale"])
def test_mixture_with_nan_answers_nan(scale, where, draw_mixtures):
    params, y = draw_mixtures((3, 4), F32)
    if where == "all logits":
        params[1, :, 0] = -torch.inf
    else:
        params[1, 2, ["logit", "mean", "scale"].index(where)] = torch.nan
    answers = [
        mixture_variance(params, scale=scale),
        mixture_cdf(params, y, scale=scale),
        mixture_sample(params, scale=scale),
        *mixture_quantiles(params, [0.0, 0.3, 1.0], scale=scale).unbind(-1),
    ]
    if where != "scale":
        answers.append(mixture_mean(params, scale=scale))
    assert all(answer.isnan().tolist() == [False, True, False] for answer in answers)


def test_component_without_weight_does_not_move_quantiles(draw_mixtures):
    params, _ = draw_mixtures((4, 3), F64)
    params[:, 1, 0], params[:, 1, 1] = -torch.inf, 1e300
    found = mixture_quantiles(params, LEVELS)
    assert close(found, mixture_quantiles(params[:, [0, 2]], LEVELS))


@pytest.mark.sampled
@pytest.mark.parametrize("function", ["mean", "variance", "cdf", "quantiles"])
def test_gradients_are_the_derivatives(function, scale, draw_mixtures):
    params, y = draw_mixtures((2, 3), F64, y_dtype=F64)
    call, others = {
        "mean": (mixture_mean, ()),
        "variance": (mixture_variance, ()),
        "cdf": (mixture_cdf, (y,)),
        "quantiles": (mixture_quantiles, (torch.tensor([0.1, 0.6], dtype=F64),)),
    }[function]
    leaves = [x.requires_grad_() for x in (params, *others)]
    assert torch.autograd.gradcheck(lambda *t: call(*t, scale=scale), leaves)
    assert torch.autograd.gradgradcheck(lambda *t: call(*t, scale=scale), leaves)


def test_quantiles_are_mapped_and_compiled(draw_mixtures):
    params, _ = draw_mixtures((3, 4), F32)
    levels = torch.tensor(LEVELS)

    def quantiles(params):
        return mixture_quantiles(params, levels)

    found = quantiles(params)
    assert torch.equal(torch.func.vmap(quantiles)(params), found)
    torch._dynamo.reset()
    compiled = torch.compile(quantiles, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(params), found)


def test_quantile_where_there_is_no_density_gets_no_gradient():
    params = torch.tensor([[[0.0, -1e30, 0.0], [0.0, 1e30, 0.0]]], requires_grad=True)
    found = mixture_quantiles(params, [0.5])
    (dparams,) = torch.autograd.grad(found.sum(), params)
    assert dparams.isfinite().all()


def test_samples_follow_the_distribution(scale, draw_mixtures):
    params, _ = draw_mixtures((3,), F64)
    draws = 50_000
    sample = mixture_sample(params.expand(draws, 3, 3), scale=scale)
    level = mixture_cdf(params, sample, scale=scale).sort().values
    steps = torch.arange(1, draws + 1, dtype=F64) / draws
    # Kolmogorov's distance stays below this with probability 1 - 1e-6.
    assert (level - steps).abs().max() <= 2.7 / draws**0.5


def test_samples_follow_their_generator(draw_mixtures):
    params, _ = draw_mixtures((50, 3), F32)
    one, other = (
        mixture_sample(params, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, mixture_sample(params))


def test_no_gradient_flows_through_samples(draw_mixtures):
    params, _ = draw_mixtures((5, 3), F32)
    assert not mixture_sample(params.requires_grad_()).requires_grad


def test_low_precision_parameters_are_asked_in_fp32(device, draw_mixtures):
    params, y = draw_mixtures((5, 3), BF16, device)
    with torch.autocast(device, BF16):
        for found in (
            mixture_mean(params),
            mixture_variance(params),
            mixture_cdf(params, y),
            mixture_quantiles(params, [0.5]),
            mixture_sample(params),
        ):
            assert found.dtype == F32


def head_of(**options) -> GaussianMixtureHead:
    return GaussianMixtureHead(6, 10, 4, outputs=2, **options)


def test_head_makes_parameters_and_answers(scale, backend, device):
    head = head_of(scale=scale, backend=backend, device=device)
    t, y = torch.randn(3, 5, 6, device=device), torch.randn(3, 5, 2, device=device)
    mask = torch.rand(3, 5, 1, device=device) < 0.5
    params = head(t)
    assert (params.shape, params.dtype) == ((3, 5, 2, 4, 3), F32)
    log_p = head.log_likelihood(params, y)
    assert log_p.shape == y.shape
    assert close(head.loss(params, y), -log_p.mean())
    expected = -(log_p * mask).sum() / mask.expand(3, 5, 2).sum()
    assert close(head.loss(params, y, mask), expected)
    for answer in (head.sample(params), head.mean(params), head.variance(params)):
        assert answer.shape == y.shape
    assert head.quantiles(params, LEVELS).shape == (*y.shape, len(LEVELS))
    middle = head.cdf(params, head.quantiles(params, [0.5]).squeeze(-1))
    assert close(middle, torch.full_like(middle, 0.5))


@pytest.mark.parametrize(("backend", "steps"), [("triton", 3), ("reference", 100)])
def test_every_parameter_gets_a_gradient_and_padding_stays_zero(scale, backend, steps, device):
    head = head_of(scale=scale, backend=backend, device=device)
    assert head.output.shape == (8, 32, 3)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    t, y = torch.randn(30, 6, device=device), torch.randn(30, 2, device=device)
    losses = []
    for _ in range(steps):
        loss = head.loss(head(t), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert head.hidden.weight.grad.view(8, 32, 6)[:, :10].any(-1).all()
    assert head.output.grad[:, :10].any(-1).all()
    assert not any(unused.any() for unused in head.padding())


def test_state_dict_holds_the_weights_in_the_width_of_the_networks(device):
    head, other = (GaussianMixtureHead(6, 10, 4, outputs=2, device=device) for _ in range(2))
    stored = {name: p.detach().clone() for name, p in head.named_parameters()}
    state = head.state_dict()
    assert torch.equal(state["output"], head.output[:, :10])
    hidden = head.hidden.weight.view(8, 32, 6)[:, :10]
    assert torch.equal(state["hidden.weight"], hidden.flatten(0, 1))
    # With the padding, as they were saved once, they load too.
    for saved in (state, stored):
        other.load_state_dict(saved)
        assert all(map(torch.equal, other.parameters(), head.parameters()))
        other.reset_parameters()


@pytest.mark.parametrize("width", [9, 11, 32, 33])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_weights_of_another_width_are_refused_and_stay_as_they_are(width, assign):
    """Stored as wide, too; alone, in a model, and by copies of a head."""
    head, wide = (GaussianMixtureHead(6, f, 4) for f in (10, width))
    state = wide.state_dict()
    before = copy.deepcopy(state)
    for own in (head, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        with pytest.raises(RuntimeError, match=rf"size mismatch for output: .*, {width}, 3\]"):
            own.load_state_dict(state, assign=assign)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.hidden\.weight: "):
        torch.nn.Sequential(head).load_state_dict(
            torch.nn.Sequential(wide).state_dict(), assign=assign
        )
    assert all(torch.equal(weight, before[name]) for name, weight in state.items())


def test_stored_width_of_a_state_dict_may_be_another():
    head, other = GaussianMixtureHead(6, 10, 4, stored_width=10), GaussianMixtureHead(6, 10, 4)
    other.load_state_dict(head.state_dict())
    t = torch.randn(5, 6)
    assert close(other(t), head(t))
    head.load_state_dict(other.state_dict())


def test_fresh_head_is_near_the_standard_normal_distribution():
    head = GaussianMixtureHead(64, 100, 5)
    params = head(torch.randn(500, 64))
    mean, variance = head.mean(params), head.variance(params)
    assert mean.abs().max() < 0.2
    assert (variance - 1).abs().max() < 0.2


def test_head_is_copied_pickled_and_made_on_meta():
    head = head_of()
    t = torch.randn(3, 6)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert repr(other) == repr(head)
        assert torch.equal(other(t), head(t))
    empty = head_of(device="meta").to_empty(device="cpu")
    empty.load_state_dict(head.state_dict())
    assert torch.equal(empty(t), head(t))
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == {
        "output": (8, 32, 3),
        "hidden.weight": (256, 6),
    }
