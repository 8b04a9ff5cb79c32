"""mixture_nll and mixture_log_likelihood: sizes, layouts and masks, with all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from fusewright import mixture_head
from fusewright.mixture_head import mixture_log_likelihood, mixture_nll
from fusewright.mixture_head.common.scale import checked_scale
from fusewright.mixture_head.mixture import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance import layouts
from torch.distributions import Categorical, MixtureSameFamily, Normal

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF, NAN = math.inf, math.nan
LAYOUTS = (
    layouts.every_other_token,
    layouts.every_other_row,
    layouts.repeated_rows,
    layouts.columns_before_rows,
    layouts.amid_memory,
)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (65, 3), (130, 10), (64, 16), (33, 17)])
def test_values_and_gradients_are_as_near_to_fp64_as_torch(
    mixture, scale, shape, device, draw_mixtures
):
    mixture.check(draw_mixtures(shape, F32, device), scale=scale)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_low_precision_is_as_near_to_fp64_as_torch(mixture, scale, dtype, device, draw_mixtures):
    mixture.check(draw_mixtures((130, 10), dtype, device), scale=scale)


def test_many_components_are_as_near_to_fp64_as_torch(scale, device, draw_mixtures, log_likelihood):
    log_likelihood.check(draw_mixtures((3, 65), F32, device), scale=scale)


def test_many_small_weights_are_not_lost_beside_a_large_one(device, draw_mixtures, log_likelihood):
    params, y = draw_mixtures((3, 130), F32, device)
    # Each is less than half a unit in the last place of the first.
    params[:, 1:, 0] = params[:, :1, 0] - 17.0
    params[:, :, 1:] = params[:, :1, 1:]
    log_likelihood.check([params, y])


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (2, 3, 2, 4), (2, 1, 3, 1, 4)])
def test_every_leading_axis_counts_mixtures(mixture, shape, device, draw_mixtures):
    params, y = draw_mixtures(shape, F32, device)
    mixture.check([params, y])
    flat = mixture.kernels(params.view(-1, 4, 3), y.flatten())
    assert torch.equal(mixture.kernels(params, y).flatten(), flat.flatten())


def test_mean_over_more_programs_than_one_round_adds(
    device, monkeypatch, scale, draw_mixtures, nll
):
    from fusewright.mixture_head.mixture import launch

    launch.forward_plan.cache_clear()
    monkeypatch.setattr(launch, "MEAN", launch.MEAN._replace(block=2))
    tensors = draw_mixtures((300, 10), F32, device)
    mask = torch.rand(300, device=device) < 0.5
    for marks in (None, mask):
        nll.check(tensors, scale=scale, mask=marks)
    launch.forward_plan.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "y_dtype"), [(F32, BF16), (F32, F64), (BF16, F32), (BF16, F16), (F16, BF16)]
)
def test_targets_keep_their_own_dtype(mixture, dtype, y_dtype, device, draw_mixtures):
    mixture.check(draw_mixtures((7, 5), dtype, device, y_dtype))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides_are_read_as_they_are(mixture, layout, device, draw_mixtures):
    mask = torch.randn(3, 4, device=device) < 0.4
    params, y, mask = map(layout, (*draw_mixtures((3, 4, 5), F16, device), mask))
    mixture.check([params, y], mask=mask)
    found = mixture.kernels(params, y, mask)
    plain = (x.contiguous() for x in (params, y, mask))
    assert torch.equal(found, mixture.kernels(*plain))
    assert found.is_contiguous()


def test_masked_targets_add_nothing(mixture, scale, device, draw_mixtures):
    params, y = draw_mixtures((70, 10), F32, device)
    mask = torch.arange(70, device=device) % 3 != 1
    mixture.check([params, y], scale=scale, mask=mask)
    kept = mixture.kernels(params[mask], y[mask], scale=scale)
    found = mixture.kernels(params, y, mask, scale=scale)
    if mixture.name == "mixture_nll":
        allowed = 4 * torch.finfo(F32).eps * kept.abs()
        assert (found - kept).abs() <= allowed
    else:
        assert torch.equal(found[mask], kept)
        assert not found[~mask].any()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_masked_may_hold_anything(
    mixture, scale, value, backend, device, draw_mixtures, values_and_gradients
):
    params, y = draw_mixtures((6, 4), F32, device)
    mask = torch.tensor([True, False, True, True, False, True], device=device)

    def call(params, y):
        return mixture.public(params, y, mask, scale=scale, backend=backend)

    expected = values_and_gradients(call, params, y)
    params[1] = value
    y[[1, 4]] = value
    for found, clean in zip(values_and_gradients(call, params, y), expected, strict=True):
        assert torch.equal(found, clean)
    _, dparams, dy = expected
    assert not dparams[~mask].any()
    assert not dy[~mask].any()


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("implementation", ["triton", "reference", "op"])
def test_upstream_gradient_of_what_is_masked_may_hold_anything(
    mixture, implementation, value, device, draw_mixtures
):
    tensors = [t.requires_grad_() for t in draw_mixtures((6, 4), F32, device)]
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    form = checked_scale("log_sigma", (-7.0, 5.0), 1e-3)._asdict()
    is_mean = mixture.name == "mixture_nll"

    def gradients(upstream):
        if implementation == "op":
            factor = torch.tensor(-0.25, device=device) if is_mean else None
            return reference.mixture_backward(upstream, factor, *tensors, mask, **form)
        loss = mixture.public(*tensors, mask, backend=implementation)
        return torch.autograd.grad(loss, tensors, upstream)

    if is_mean:
        # The one number belongs to every target that counts.
        for found in gradients(torch.tensor(value, device=device)):
            assert not found[mask].isfinite().any()
            assert not found[~mask].any()
        return
    upstream = torch.randn(6, device=device)
    not_finite = torch.where(mask, upstream, value)
    for found, clean in zip(gradients(not_finite), gradients(upstream), strict=True):
        assert torch.equal(found, clean)
        assert not found[~mask].any()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (5, 4)])
def test_no_target_that_counts_is_a_loss_of_zero(
    shape, backend, device, draw_mixtures, values_and_gradients
):
    params, y = draw_mixtures(shape, F32, device)
    mask = torch.zeros(shape[:-1], dtype=torch.bool, device=device)
    for marks in (mask, None) if 0 in shape else (mask,):
        loss, *grads = values_and_gradients(
            lambda p, y, m=marks: mixture_nll(p, y, m, backend=backend), params, y
        )
        assert (loss.shape, loss.item()) == ((), 0.0)
        assert [g.shape for g in grads] == [params.shape, y.shape]
        assert not any(g.any() for g in grads)


def test_mask_broadcasts_over_outputs(mixture, backend, device, draw_mixtures):
    params, y = draw_mixtures((4, 3, 2, 5), F32, device)
    mask = torch.rand(4, 3, 1, device=device) < 0.5
    found = mixture.public(params, y, mask, backend=backend)
    assert torch.equal(found, mixture.public(params, y, mask.expand(4, 3, 2), backend=backend))


def test_outputs_are_mixtures_of_their_own(device, draw_mixtures):
    params, y = draw_mixtures((4, 2, 5), F32, device)
    joint = mixture_log_likelihood(params, y, backend="triton")
    for index in range(2):
        alone = mixture_log_likelihood(params[:, index], y[:, index], backend="triton")
        assert torch.equal(joint[:, index], alone)


def test_likelihood_is_that_of_torch_distributions(scale, backend, device, draw_mixtures):
    params, y = draw_mixtures((40, 6), F32, device)
    logits, mean, raw = params.double().unbind(-1)
    sigma = raw.exp() if scale == "log_sigma" else torch.nn.functional.softplus(raw) + 1e-3
    expected = MixtureSameFamily(Categorical(logits=logits), Normal(mean, sigma)).log_prob(
        y.double()
    )
    found = mixture_log_likelihood(params, y, scale=scale, backend=backend)
    assert (found - expected).abs().max() <= 8 * torch.finfo(F32).eps * expected.abs().max()


def test_one_component_is_a_normal_density(device, draw_mixtures):
    params, y = draw_mixtures((40, 1), F32, device)
    expected = Normal(params[:, 0, 1].double(), params[:, 0, 2].double().exp()).log_prob(y.double())
    found = mixture_log_likelihood(params, y, backend="triton")
    assert (found - expected).abs().max() <= 8 * torch.finfo(F32).eps * expected.abs().max()
    params = params.requires_grad_()
    (dparams,) = torch.autograd.grad(mixture_nll(params, y, backend="triton"), params)
    assert not dparams[:, 0, 0].any()


@pytest.mark.parametrize("options", [dict(log_sigma_range=(-1.0, 0.5)), dict(eps=0.25)], ids=str)
def test_range_and_eps_are_the_callers(mixture, scale, options, device, draw_mixtures):
    tensors = draw_mixtures((20, 5), F32, device)
    mixture.check(tensors, scale=scale, **options)
    ours = mixture.kernels(*tensors, scale=scale, **options)
    changes = ("eps" in options) == (scale == "softplus")
    assert torch.equal(ours, mixture.kernels(*tensors, scale=scale)) != changes


@pytest.mark.parametrize("components", [5, 20])
def test_order_of_the_components_does_not_matter(
    mixture, components, backend, device, draw_mixtures
):
    order = torch.randperm(components, device=device)
    yardstick = Yardstick(mixture.reference, draw_mixtures((20, components), F32, device))
    yardstick.check(lambda params, y: mixture.public(params[:, order], y, backend=backend))


def test_rows_do_not_see_one_another(device, draw_mixtures, values_and_gradients):
    params, y = draw_mixtures((70, 10), F32, device)
    not_finite = params.clone()
    not_finite[5], not_finite[69] = NAN, INF
    others = [i for i in range(70) if i not in (5, 69)]

    def call(*tensors):
        return mixture_log_likelihood(*tensors, backend="triton")

    clean, found = (values_and_gradients(call, p, y) for p in (params, not_finite))
    for one, other in zip(clean, found, strict=True):
        assert torch.equal(one[others], other[others])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_low_precision_parameters_are_computed_in_fp32(mixture, dtype, device, draw_mixtures):
    params, y = draw_mixtures((50, 10), dtype, device)
    found = mixture.kernels(params, y)
    assert found.dtype == F32
    assert torch.equal(found, mixture.kernels(params.float(), y))


def test_auto_on_the_cpu_is_the_reference(draw_mixtures):
    params, y = draw_mixtures((5, 4), F64)
    assert mixture_head.mixture_nll(params, y).dtype == F64
    assert torch.equal(mixture_nll(params, y), mixture_nll(params, y, backend="reference"))
