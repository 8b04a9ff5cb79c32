"""mixture_nll and mixture_log_likelihood: sizes, layouts, masks and extreme values, with all
gradients.
"""

from __future__ import annotations

import math

import pytest
import torch
from fusewright import mixture_head
from fusewright.mixture_head import mixture_log_likelihood, mixture_nll
from torch.distributions import Categorical, MixtureSameFamily, Normal

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF, NAN = math.inf, math.nan
KERNELS_AND_REFERENCE = pytest.mark.parametrize("backend", ["triton", "reference"])


def values_and_gradients(call, params, y):
    params, y = (x.detach().clone().requires_grad_() for x in (params, y))
    value = call(params, y)
    return value.detach(), *torch.autograd.grad(value.sum(), (params, y))


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 1), (1, 2), (65, 3), (130, 10), (64, 16), (9, 33), (33, 64)]
)
def test_values_and_gradients_are_as_near_to_fp64_as_torch(
    mixture, scale, shape, device, draw_mixtures
):
    mixture.check(draw_mixtures(shape, F32, device), scale=scale)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("shape", [(1, 1), (65, 3), (130, 10)])
def test_low_precision_is_as_near_to_fp64_as_torch(
    mixture, scale, shape, dtype, device, draw_mixtures
):
    mixture.check(draw_mixtures(shape, dtype, device), scale=scale)


@pytest.mark.parametrize("shape", [(1, 65), (5, 256), (3, 700), (1, 1025)])
def test_many_components_are_as_near_to_fp64_as_torch(mixture, scale, shape, device, draw_mixtures):
    mixture.check(draw_mixtures(shape, F32, device), scale=scale)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (2, 3, 2, 4), (2, 1, 3, 1, 4)])
def test_every_leading_axis_counts_mixtures(mixture, shape, device, draw_mixtures):
    params, y = draw_mixtures(shape, F32, device)
    mixture.check([params, y])
    flat = mixture.kernels(params.view(-1, 4, 3), y.flatten())
    assert torch.equal(mixture.kernels(params, y).flatten(), flat.flatten())


def test_mean_over_more_programs_than_one_round_adds(
    device, monkeypatch, scale, draw_mixtures, nll
):
    from fusewright.mixture_head import _mixture_launch

    _mixture_launch.mixture_plan.cache_clear()
    finish = _mixture_launch.FINISH._replace(block=2)
    monkeypatch.setattr(_mixture_launch, "FINISH", finish)
    tensors = draw_mixtures((300, 10), F32, device)
    mask = torch.rand(300, device=device) < 0.5
    for marks in (None, mask):
        nll.check(tensors, scale=scale, mask=marks)
    _mixture_launch.mixture_plan.cache_clear()


@pytest.mark.parametrize("y_dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_targets_keep_their_own_dtype(mixture, dtype, y_dtype, device, draw_mixtures):
    mixture.check(draw_mixtures((7, 5), dtype, device, y_dtype))


def of_longer_sequences(shape, device):
    return torch.randn(shape[0], shape[1] + 3, *shape[2:], device=device)[:, 3:]


def every_other_row(shape, device):
    return torch.randn(2 * shape[0], *shape[1:], device=device)[::2]


def repeated(shape, device):
    return torch.randn(1, *shape[1:], device=device).expand(shape)


def reversed_axes(shape, device):
    return torch.randn(shape[::-1], device=device).permute(*reversed(range(len(shape))))


def at_an_odd_offset(shape, device):
    return torch.randn(1 + math.prod(shape), device=device)[1:].view(shape)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "layout",
    [of_longer_sequences, every_other_row, repeated, reversed_axes, at_an_odd_offset],
    ids=lambda layout: layout.__name__,
)
def test_any_strides_are_read_as_they_are(mixture, layout, dtype, device):
    shape = (3, 4, 5)
    params, y = layout((*shape, 3), device).to(dtype), layout(shape[:-1], device)
    mask = layout(shape[:-1], device) < 0.4
    mixture.check([params, y], mask=mask)
    found = mixture.kernels(params, y, mask)
    assert torch.equal(found, mixture.kernels(params.contiguous(), y.contiguous(), mask))
    assert found.is_contiguous()


@pytest.mark.parametrize("shape", [(5, 4), (70, 10)])
def test_masked_targets_add_nothing(mixture, scale, shape, device, draw_mixtures):
    params, y = draw_mixtures(shape, F32, device)
    mask = torch.arange(shape[0], device=device) % 3 != 1
    mixture.check([params, y], scale=scale, mask=mask)
    kept = mixture.kernels(params[mask], y[mask], scale=scale)
    found = mixture.kernels(params, y, mask, scale=scale)
    if mixture.name == "mixture_nll":
        allowed = 4 * torch.finfo(F32).eps * kept.abs()
        assert (found - kept).abs() <= allowed
    else:
        assert torch.equal(found[mask], kept)
        assert not found[~mask].any()


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_masked_may_hold_anything(mixture, scale, value, backend, device, draw_mixtures):
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


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (5, 4)])
def test_no_target_that_counts_is_a_loss_of_zero(shape, backend, device, draw_mixtures):
    params, y = draw_mixtures(shape, F32, device)
    mask = torch.zeros(shape[:-1], dtype=torch.bool, device=device)
    for marks in (mask, None) if 0 in shape else (mask,):
        loss, *grads = values_and_gradients(
            lambda p, y, m=marks: mixture_nll(p, y, m, backend=backend), params, y
        )
        assert (loss.shape, loss.item()) == ((), 0.0)
        assert [g.shape for g in grads] == [params.shape, y.shape]
        assert not any(g.any() for g in grads)


@KERNELS_AND_REFERENCE
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


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("value", [1e3, -1e3, 30.0, -30.0, 1e30, -1e30])
def test_extreme_scales_are_as_near_to_fp64_as_torch(
    mixture, scale, value, dtype, device, draw_mixtures
):
    params, y = draw_mixtures((12, 5), dtype, device)
    params[:4, :, 2] = value
    params[4:8, 0, 2] = value
    mixture.check([params, y], scale=scale)


@pytest.mark.parametrize("value", [-7.0, 5.0])
def test_gradient_passes_at_the_ends_of_the_range_as_in_torch(
    mixture, value, device, draw_mixtures
):
    params, y = draw_mixtures((5, 3), F32, device)
    params[:3, 1, 2] = value
    mixture.check([params, y])


@pytest.mark.parametrize("value", [1e2, -1e4, 1e8, 1e20, -1e30, 3e38])
def test_distant_targets_are_as_near_to_fp64_as_torch(mixture, scale, value, device, draw_mixtures):
    params, y = draw_mixtures((8, 5), F32, device)
    y[:3] = value
    mixture.check([params, y], scale=scale)
    everything = values_and_gradients(
        lambda *t: mixture.kernels(*t, scale=scale), *draw_mixtures((8, 5), F32, device)[:1], y
    )
    assert all(x.isfinite().all() for x in everything)


@KERNELS_AND_REFERENCE
def test_finite_parameters_give_finite_values_and_gradients(mixture, scale, backend, device):
    largest = torch.finfo(F32).max
    choices = torch.tensor([0.0, 1.0, -40.0, 1e3, -1e10, 1e30, largest, -largest], device=device)
    params = choices[torch.randint(8, (300, 3, 3), device=device)]
    y = choices[torch.randint(8, (300,), device=device)]
    everything = values_and_gradients(
        lambda *t: mixture.public(*t, scale=scale, backend=backend), params, y
    )
    assert all(x.isfinite().all() for x in everything)


@pytest.mark.parametrize("value", [-50.0, -200.0, -1e30, -INF])
def test_component_without_weight_has_no_say(mixture, scale, value, device, draw_mixtures):
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


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("where", ["target", "weight", "mean", "scale"])
def test_nan_makes_its_own_row_nan(scale, where, backend, device, draw_mixtures):
    params, y = draw_mixtures((5, 4), F32, device)
    if where == "target":
        y[2] = NAN
    else:
        params[2, 1, ["weight", "mean", "scale"].index(where)] = NAN
    log_p, dparams, dy = values_and_gradients(
        lambda *t: mixture_log_likelihood(*t, scale=scale, backend=backend), params, y
    )
    assert log_p.isnan().tolist() == [False, False, True, False, False]
    assert dparams[2, :, 1].isnan().all()
    assert dy[2].isnan()
    assert dparams[[0, 1, 3, 4]].isfinite().all()
    assert mixture_nll(params, y, scale=scale, backend=backend).isnan()


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("value", [INF, -INF])
def test_infinite_target_counts_as_very_far(value, backend, device, draw_mixtures):
    params, y = draw_mixtures((3, 4), F32, device)
    y[1] = value
    log_p, dparams, dy = values_and_gradients(
        lambda *t: mixture_log_likelihood(*t, backend=backend), params, y
    )
    assert log_p[1] == -(2.0**99)
    assert dparams.isfinite().all()
    assert dy[1] == 0.0
    assert not dparams[1, :, 1].any()


@KERNELS_AND_REFERENCE
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


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("options", [dict(log_sigma_range=(-1.0, 0.5)), dict(eps=0.25)], ids=str)
def test_range_and_eps_are_the_callers(mixture, scale, options, backend, device, draw_mixtures):
    tensors = draw_mixtures((20, 5), F32, device)
    mixture.check(tensors, scale=scale, **options)
    ours = mixture.public(*tensors, scale=scale, backend=backend, **options)
    changes = ("eps" in options) == (scale == "softplus")
    assert torch.equal(ours, mixture.public(*tensors, scale=scale, backend=backend)) != changes


def test_fp16_slopes_that_pass_its_range_give_the_mean_a_finite_gradient(
    device, draw_mixtures, nll
):
    params, y = draw_mixtures((2000, 2), F16, device)
    params[:, :, 2], y[:] = -6.0, 2.0
    nll.check([params, y])


def test_order_of_the_components_does_not_matter(device, draw_mixtures):
    params, y = draw_mixtures((20, 5), F64, "cpu")
    order = torch.randperm(5)
    one, other = (mixture_log_likelihood(p, y) for p in (params, params[:, order]))
    assert (one - other).abs().max() <= 8 * torch.finfo(F64).eps * one.abs().max()


def test_rows_do_not_see_one_another(device, draw_mixtures):
    params, y = draw_mixtures((70, 10), F32, device)
    spoiled = params.clone()
    spoiled[5], spoiled[69] = NAN, INF
    others = [i for i in range(70) if i not in (5, 69)]

    def call(*tensors):
        return mixture_log_likelihood(*tensors, backend="triton")

    clean, found = (values_and_gradients(call, p, y) for p in (params, spoiled))
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
