"""What the ops compute beyond closeness: offsets, special values, statistics of the rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_gated,
)
from fusewright.norm.row_norm import reference
from fusewright_testkit import Yardstick

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF, NAN = math.inf, math.nan
# Fused with the sum, and of a sum.
ADDING = pytest.mark.parametrize(
    ("adding", "alone"), [(add_rms_norm, rms_norm), (add_layer_norm, layer_norm)]
)
KERNELS_AND_REFERENCE = pytest.mark.parametrize("backend", ["triton", "reference"])


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "rms_norm_gated"], indirect=True)
@pytest.mark.parametrize("vector_dtype", [F32, BF16])
def test_weight_offset_is_added_in_fp32(op, vector_dtype, device):
    *rows, weight = op.draw((5, 60), F32, device)
    # Beside 1, bf16 keeps no trace of weights as small as these.
    tensors = [*rows, (weight * 1e-3).to(vector_dtype)]
    op.check(tensors, weight_offset=1.0)
    if vector_dtype == BF16:
        yardstick = Yardstick(lambda *t: op.reference(*t, weight_offset=1.0), tensors)
        with pytest.raises(AssertionError, match="largest error"):
            yardstick.check(lambda *t: op.kernels(*t[:-1], t[-1] + 1.0))


@pytest.mark.parametrize("op", ["rms_norm_gated"], indirect=True)
def test_gate_may_be_a_sigmoid_alone(op, device, scheme):
    tensors = op.draw((9, 70), F32, device)
    tensors[1] *= 4
    op.check(tensors, activation="sigmoid")


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gate_of_any_size_opens_and_closes(activation, backend, device):
    x = torch.randn(2, 40, device=device)
    gate = torch.tensor([1e4, -1e4], device=device)[:, None].expand(2, 40)
    leaves = [t.clone().requires_grad_() for t in (x, gate)]
    y = rms_norm_gated(*leaves, activation=activation, backend=backend)
    factor = 1e4 if activation == "silu" else 1.0
    torch.testing.assert_close(y[0], factor * rms_norm(x[0]))
    assert not y[1].any()
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert all(g.isfinite().all() for g in grads)


@ADDING
@pytest.mark.parametrize("used", ["y", "sum"])
def test_one_output_of_two_may_be_used_alone(used, adding, alone, device):
    x, residual = torch.randn(2, 4, 30, device=device)
    weight = torch.randn(30, device=device)
    grad = torch.randn(4, 30, device=device)
    yardstick = Yardstick(
        lambda *t: getattr(reference, adding.__name__)(*t, eps=1e-6),
        [x, residual, weight],
        [grad, None] if used == "y" else [None, grad],
    )
    yardstick.check(lambda *t: adding(*t, eps=1e-6, backend="triton"))


@ADDING
@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norm_is_that_of_the_rounded_sum(dtype, backend, adding, alone, device):
    x, residual, weight = torch.randn(3, 6, 90, device=device).to(dtype)
    y, total = adding(x, residual, weight[0], backend=backend)
    if dtype != BF16 or backend == "reference" or device == "cuda":
        # Triton's interpreter rounds to bf16 towards zero.
        assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    assert torch.equal(y, alone(total, weight[0], backend=backend))


@ADDING
def test_wide_norm_is_that_of_the_rounded_sum(scheme, adding, alone, device):
    x, residual = torch.randn(2, 3, 150, device=device).to(BF16)
    y, total = adding(x, residual, backend="triton")
    assert torch.equal(y, alone(total, backend="triton"))


@KERNELS_AND_REFERENCE
def test_rows_of_rms_norm_have_mean_square_one(backend, device):
    y = rms_norm(7 * torch.randn(4, 200, device=device), eps=0.0, backend=backend)
    mean_square = y.double().square().mean(-1)
    assert (mean_square - 1).abs().max() <= 8 * torch.finfo(F32).eps


@KERNELS_AND_REFERENCE
def test_rows_of_layer_norm_have_mean_zero_and_variance_one(backend, device):
    y = layer_norm(3 + 7 * torch.randn(4, 200, device=device), eps=0.0, backend=backend).double()
    bound = 8 * torch.finfo(F32).eps
    assert y.mean(-1).abs().max() <= bound
    assert (y.var(-1, correction=0) - 1).abs().max() <= bound


def test_layer_norm_of_rows_far_from_zero_keeps_their_spread(device, scheme):
    x = 1e4 + torch.randn(3, 150, device=device)
    weight, bias = torch.randn(2, 150, device=device)
    yardstick = Yardstick(lambda *t: reference.layer_norm(*t, eps=1e-6), [x, weight, bias])
    yardstick.check(lambda *t: layer_norm(*t, eps=1e-6, backend="triton"))

    def by_a_difference_of_moments(x, weight, bias):
        mean = x.mean(-1, keepdim=True)
        variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        return (x - mean) * torch.rsqrt(variance + 1e-6) * weight + bias

    with pytest.raises(AssertionError, match="error"):
        yardstick.check(by_a_difference_of_moments)


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("rows", [1, 5])
def test_layer_norm_of_one_column_is_its_bias_and_passes_no_gradient(rows, backend, device):
    x = torch.randn(rows, 1, device=device, requires_grad=True)
    weight = torch.randn(1, device=device, requires_grad=True)
    bias = torch.randn(1, device=device)
    y = layer_norm(x, weight, bias, backend=backend)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert torch.equal(y, bias.expand(rows, 1))
    assert not dx.any()
    assert not dweight.any()


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_eps_is_that_of_torch_where_it_is_left_out(dtype, backend, device):
    x = (torch.randn(3, 50, device=device) * 1e-3).to(dtype)
    eps = torch.finfo(F32).eps
    assert torch.equal(rms_norm(x, backend=backend), rms_norm(x, eps=eps, backend=backend))
    truth = F.rms_norm(x.double(), (50,), eps=eps)
    nearest = truth - F.rms_norm(x, (50,)).double()
    # torch's own choice is this one: with another eps it would be off by more than its rounding.
    assert nearest.abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max()


@KERNELS_AND_REFERENCE
def test_nan_in_a_row_makes_that_row_nan(op, backend, device):
    tensors = op.draw((4, 40), F32, device)
    tensors[0][1, 7] = NAN
    y = op.first(op.public(*tensors, backend=backend))
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("value", [INF, -INF])
def test_infinity_turns_its_row_to_zeros_and_itself_to_nan(value, backend, device):
    x = torch.randn(3, 40, device=device)
    x[1, 7] = value
    y = rms_norm(x, torch.ones(40, device=device), backend=backend)
    assert y[1, 7].isnan()
    assert not y[1, torch.arange(40, device=device) != 7].any()
    assert y[[0, 2]].isfinite().all()
    y, total = add_rms_norm(x, torch.zeros_like(x), backend=backend)
    assert total[1, 7] == value
    assert y[1, 7].isnan()
    assert layer_norm(x, backend=backend)[1].isnan().all()


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize(("dtype", "value"), [(F32, 1e30), (BF16, 1e30), (BF16, 3e38)])
def test_squares_beyond_fp32_make_a_row_of_rms_norm_zeros(dtype, value, backend, device):
    x = torch.full((2, 40), value, dtype=dtype, device=device)
    assert not rms_norm(x, torch.ones(40, device=device), backend=backend).any()
    assert not rms_norm(-x, backend=backend).any()


@KERNELS_AND_REFERENCE
def test_squares_beyond_fp32_make_a_row_of_layer_norm_its_bias(backend, device):
    x = 1e30 * torch.randn(2, 40, device=device)
    bias = torch.randn(40, device=device)
    assert torch.equal(layer_norm(x, None, bias, backend=backend), bias.expand(2, 40))


@KERNELS_AND_REFERENCE
def test_a_sum_beyond_fp32_makes_a_row_of_layer_norm_nan(backend, device):
    x = torch.full((2, 40), 3e38, device=device)
    assert layer_norm(x, backend=backend).isnan().all()


def test_tiny_numbers_are_as_near_to_fp64_as_torch(op, device):
    tensors = op.draw((3, 40), F32, device)
    tensors[: op.rows] = [1e-30 * t for t in tensors[: op.rows]]
    op.check(tensors, eps=1e-12)


@KERNELS_AND_REFERENCE
def test_zeros_stay_zeros(op, backend, device):
    shape = (3, 40)
    rows = [torch.zeros(shape, device=device, requires_grad=True) for _ in range(op.rows)]
    y = op.first(op.public(*rows, backend=backend))
    grads = torch.autograd.grad(y, rows, torch.randn_like(y))
    assert not y.any()
    assert all(g.isfinite().all() for g in grads)


def test_infinity_spreads_through_gradients_as_in_eager_torch(op, device):
    tensors = op.draw((3, 40), F32, device)
    tensors[0][1] *= INF
    op.check(tensors)
