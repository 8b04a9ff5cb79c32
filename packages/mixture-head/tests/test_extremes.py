"""mixture_nll and mixture_log_likelihood where numbers are extreme, infinite or NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.mixture_head import mixture_log_likelihood, mixture_nll
from fusewright.mixture_head.common.scale import checked_scale
from fusewright.mixture_head.mixture import reference
from fusewright_testkit import Yardstick

F32, F16 = torch.float32, torch.float16
INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(F32).max


@pytest.mark.sampled
@pytest.mark.parametrize("value", [30.0, -30.0, 1e30, -1e30])
def test_extreme_scales_are_as_near_to_fp64_as_torch(mixture, scale, value, device, draw_mixtures):
    params, y = draw_mixtures((12, 5), F32, device)
    params[:4, :, 2] = value
    params[4:8, 0, 2] = value
    mixture.check([params, y], scale=scale)


def test_small_softplus_scales_keep_their_last_places(mixture, device, draw_mixtures):
    """log(1 + exp(s)) of a small exp(s), which 1 + exp(s) would round away."""
    params, y = draw_mixtures((12, 5), F32, device)
    params[:, :, 2] -= 9.0
    y = params[:, 0, 1] + y * 1e-4
    mixture.check([params, y], scale="softplus", eps=1e-6)


@pytest.mark.parametrize("value", [-7.0, 5.0])
def test_gradient_passes_at_the_ends_of_the_range_as_in_torch(
    mixture, value, device, draw_mixtures
):
    params, y = draw_mixtures((5, 3), F32, device)
    params[:3, 1, 2] = value
    mixture.check([params, y])


@pytest.mark.sampled
@pytest.mark.parametrize("value", [-1e4, 1e8, 3e38])
def test_distant_targets_are_as_near_to_fp64_as_torch(mixture, scale, value, device, draw_mixtures):
    params, y = draw_mixtures((8, 5), F32, device)
    y[:3] = value
    mixture.check([params, y], scale=scale)


def test_distance_past_the_range_of_fp32_counts_as_what_it_is(mixture, device):
    params = torch.tensor([[[0.0, -3e38, 3e38]]], device=device)
    mixture.check([params, torch.tensor([3e38], device=device)], scale="softplus")


def slopes_of(responsibilities, scale, near):
    """The slopes of log p by w, mu, s and y where the responsibilities are known; of targets that
    are not ``near`` no distance counts.
    """

    def slopes(params, y):
        logits, mean, raw = params.unbind(-1)
        r = responsibilities.to(params)
        if scale == "log_sigma":
            sigma, log_sigma_slope = raw.exp(), 1.0
        else:
            sigma = F.softplus(raw) + 1e-3
            log_sigma_slope = raw.sigmoid() / sigma
        z = (y[:, None] - mean) / sigma if near else torch.zeros_like(mean)
        by_mean = r * z / sigma
        by_raw = r * (z.square() - 1.0) * log_sigma_slope
        return r - logits.softmax(-1), by_mean, by_raw, -by_mean.sum(-1)

    return slopes


def computed_slopes(implementation, scale):
    """The same slopes as the kernels, the reference's autograd or the CPU's op compute them."""

    def slopes(params, y):
        if implementation == "op":
            form = checked_scale(scale, (-7.0, 5.0), 1e-3)
            dparams, dy = reference.mixture_slopes(params, y, None, **form._asdict())
        else:
            log_p = mixture_log_likelihood(params, y, scale=scale, backend=implementation)
            dparams, dy = torch.autograd.grad(log_p.sum(), (params, y))
        return *dparams.unbind(-1), dy

    return slopes


IMPLEMENTATIONS = pytest.mark.parametrize(
    ("implementation", "components"),
    [("triton", 3), ("triton", 20), ("reference", 3), ("op", 3)],
)


@IMPLEMENTATIONS
@pytest.mark.sampled
@pytest.mark.parametrize("nearest", [1, 2])
@pytest.mark.parametrize("distance", [1e2, -1e14])
def test_slopes_of_distant_targets_are_those_of_the_nearest_components(
    distance, nearest, implementation, components, scale, device
):
    # One scale in a row, and components so far from one another that the nearest alone, or two
    # equal ones, explain the target.
    params = torch.randn(6, components, 3, device=device)
    y = distance * (1.0 + torch.rand(6, device=device))
    params[:, :, 1] = 0.25 * y[:, None]
    params[:, :nearest, 1] = 0.5 * y[:, None]
    params[:, :nearest, 0] = params[:, :1, 0]
    params[:, :, 2] = 0.2 * params[:, :1, 2]
    r = torch.zeros(components, device=device)
    r[:nearest] = 1.0 / nearest
    yardstick = Yardstick(slopes_of(r, scale, near=True), [params, y], [None] * 4)
    yardstick.check(computed_slopes(implementation, scale))


@IMPLEMENTATIONS
def test_slopes_of_targets_past_the_farthest_share_them_equally(
    implementation, components, scale, device, draw_mixtures
):
    params, y = draw_mixtures((6, components), F32, device)
    y[:] = -LARGEST
    r = torch.full((components,), 1.0 / components, device=device, dtype=torch.float64)
    yardstick = Yardstick(slopes_of(r, scale, near=False), [params, y], [None] * 4)
    yardstick.check(computed_slopes(implementation, scale))


def test_largest_target_counts_as_very_far(backend, device, draw_mixtures):
    params, y = draw_mixtures((3, 4), F32, device)
    y[:2] = torch.tensor([LARGEST, -LARGEST])
    log_p = mixture_log_likelihood(params, y, backend=backend)
    assert log_p[:2].tolist() == [-(2.0**99)] * 2


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("components", [1, 4, 20])
def test_infinite_target_has_no_density_and_no_gradient(
    components, dtype, scale, backend, device, draw_mixtures, values_and_gradients
):
    """log p is -inf and the row's gradients are NaN, whatever its parameters are."""
    params, y = draw_mixtures((6, components), dtype, device)
    params[1, 0, 2], params[2, 0, 2], params[3, :, 1] = 30.0, -INF, 6e4
    y[1:4] = torch.tensor([INF, -INF, INF]).to(y)
    log_p, dparams, dy = values_and_gradients(
        lambda *t: mixture_log_likelihood(*t, scale=scale, backend=backend), params, y
    )
    assert log_p[1:4].tolist() == [-INF] * 3
    assert dparams[1:4].isnan().all()
    assert dy[1:4].isnan().all()
    others = [0, 4, 5]
    alone = values_and_gradients(
        lambda *t: mixture_log_likelihood(*t, scale=scale, backend=backend),
        params[others],
        y[others],
    )
    for found, expected in zip((log_p, dparams, dy), alone, strict=True):
        assert torch.equal(found[others], expected)


@pytest.mark.parametrize("components", [3, 20])
def test_loss_of_an_infinite_target_is_infinite_where_it_counts(
    components, scale, backend, device, draw_mixtures, values_and_gradients
):
    params, y = draw_mixtures((300, components), F32, device)
    finite = y.clone()
    y[7], y[200] = INF, -INF
    loss, dparams, dy = values_and_gradients(
        lambda *t: mixture_nll(*t, scale=scale, backend=backend), params, y
    )
    assert loss == INF
    assert dparams.isnan().any((-2, -1)).nonzero().flatten().tolist() == [7, 200]
    assert dy.isnan().nonzero().flatten().tolist() == [7, 200]
    # Masked they count for nothing, to the bit.
    mask = y.isfinite()
    found, expected = (
        values_and_gradients(
            lambda *t: mixture_nll(*t, mask, scale=scale, backend=backend), params, targets
        )
        for targets in (y, finite)
    )
    assert all(map(torch.equal, found, expected))
    assert all(x.isfinite().all() for x in found)


def test_infinite_scale_of_every_component_leaves_no_density(backend, device, draw_mixtures):
    params, y = draw_mixtures((3, 4), F32, device)
    params[1, :, 2] = INF
    log_p = mixture_log_likelihood(params, y, scale="softplus", backend=backend)
    assert log_p.isinf().tolist() == [False, True, False]
    assert log_p[1] < 0


def test_finite_parameters_give_finite_values_and_gradients(
    mixture, scale, backend, device, values_and_gradients
):
    choices = torch.tensor([0.0, 1.0, -40.0, 1e3, -1e10, 1e30, LARGEST, -LARGEST], device=device)
    params = choices[torch.randint(8, (300, 3, 3), device=device)]
    y = choices[torch.randint(8, (300,), device=device)]
    params[:8] = choices[:, None, None]
    everything = values_and_gradients(
        lambda *t: mixture.public(*t, scale=scale, backend=backend), params, y
    )
    assert all(x.isfinite().all() for x in everything)


@pytest.mark.parametrize("components", [1, 3, 20])
def test_equal_logits_count_as_zeros_whatever_they_are(
    scale, components, backend, device, draw_mixtures, values_and_gradients
):
    params, y = draw_mixtures((1, components), F32, device)
    logits = torch.tensor([0.0, -2e38, -LARGEST, LARGEST], device=device)
    params = params.repeat(4, 1, 1)
    params[:, :, 0] = logits[:, None]
    for of_zeros, *others in values_and_gradients(
        lambda *t: mixture_log_likelihood(*t, scale=scale, backend=backend), params, y.repeat(4)
    ):
        assert all(torch.equal(of_zeros, other) for other in others)


@pytest.mark.sampled
@pytest.mark.parametrize("value", [-50.0, -200.0, -LARGEST, -INF])
def test_component_without_weight_has_no_say(
    mixture, scale, value, device, draw_mixtures, values_and_gradients
):
    params, y = draw_mixtures((5, 4), F32, device)
    params[:, 2, 0] = value
    mixture.check([params, y], scale=scale)
    if value <= -1e30:
        fewer = params[:, [0, 1, 3]]
        found = values_and_gradients(lambda *t: mixture.kernels(*t, scale=scale), params, y)
        truth = values_and_gradients(lambda *t: mixture.kernels(*t, scale=scale), fewer, y)
        assert not found[1][:, 2].any()
        for one, other in zip(found, truth, strict=True):
            other_eps = 8 * torch.finfo(F32).eps * other.abs().max()
            assert ((one[:, [0, 1, 3]] if one.ndim == 3 else one) - other).abs().max() <= other_eps


@pytest.mark.parametrize("where", ["target", "weight", "mean", "scale"])
def test_nan_makes_its_own_row_nan(
    scale, where, backend, device, draw_mixtures, values_and_gradients
):
    params, y = draw_mixtures((5, 4), F32, device)
    # Beside it a clamped scale, an infinite one and a distance past the farthest, whose gradients
    # are zeros elsewhere.
    params[2, 0, 2], params[2, 2, 2], params[2, 3, 1] = 30.0, -INF, 1e30
    if where == "target":
        y[2] = NAN
    else:
        params[2, 1, ["weight", "mean", "scale"].index(where)] = NAN
    log_p, dparams, dy = values_and_gradients(
        lambda *t: mixture_log_likelihood(*t, scale=scale, backend=backend), params, y
    )
    assert log_p.isnan().tolist() == [False, False, True, False, False]
    assert dparams[2].isnan().all()
    assert dy[2].isnan()
    assert dparams[[0, 1, 3, 4]].isfinite().all()
    assert mixture_nll(params, y, scale=scale, backend=backend).isnan()


def test_fp16_slopes_that_pass_its_range_give_the_mean_a_finite_gradient(
    device, draw_mixtures, nll
):
    params, y = draw_mixtures((2000, 2), F16, device)
    params[:, :, 2], y[:] = -6.0, 2.0
    nll.check([params, y])
