"""A norm and the linear layer behind it: rows far from zero, special values, dtypes, modules."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from fusewright import norm
from fusewright.norm import (
    LayerNormLinear,
    RMSNormLinear,
    layer_norm_linear,
    rms_norm_linear,
)
from fusewright.norm.norm_linear import reference
from fusewright_testkit import Yardstick

from .operations import NORM_LINEAR, NormLinearOp

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
KERNELS_AND_REFERENCE = pytest.mark.parametrize("backend", ["triton", "reference"])


@pytest.fixture(params=NORM_LINEAR)
def op(request: pytest.FixtureRequest) -> NormLinearOp:
    return NORM_LINEAR[request.param]


@pytest.mark.parametrize("shape", [(70, 33, 40), (1, 1, 1), (9, 130, 7), (2, 3, 48, 24)], ids=str)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(op, shape, device):
    op.check(op.draw(shape, F32, device))


def test_layer_norm_linear_of_rows_far_from_zero_keeps_their_spread(device):
    x = 1e4 + torch.randn(30, 150, device=device)
    norm_weight, norm_bias = torch.randn(2, 150, device=device)
    # Of one sign, so that sums over a row of it do not cancel.
    weight, bias = torch.rand(20, 150, device=device), torch.randn(20, device=device)
    tensors = [x, norm_weight, norm_bias, weight, bias]
    yardstick = Yardstick(lambda *t: reference.layer_norm_linear(*t, eps=1e-6), tensors)
    yardstick.check(lambda *t: layer_norm_linear(*t, eps=1e-6, backend="triton"))

    def with_the_mean_behind_the_product(x, norm_weight, norm_bias, weight, bias):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-6)
        folded = weight * norm_weight
        product = F.linear(x, folded) - mean * folded.sum(-1)
        return rstd * product + F.linear(norm_bias, weight, bias)

    with pytest.raises(AssertionError, match="error"):
        yardstick.check(with_the_mean_behind_the_product)


@pytest.mark.parametrize("weight_dtype", [BF16, F16, F32])
def test_weight_gives_its_dtype_to_the_product_and_to_y(op, weight_dtype, device):
    tensors = op.draw((40, 64, 24), F32, device)
    tensors[-2:] = [t.to(weight_dtype) for t in tensors[-2:]]
    assert op.kernels(*tensors).dtype == weight_dtype
    Yardstick(op.reference, tensors, dtype=weight_dtype).check(op.kernels)


@KERNELS_AND_REFERENCE
def test_rms_norm_linear_offsets_its_weight(backend, device):
    x, norm_weight, weight, bias = NORM_LINEAR["rms_norm_linear"].draw((6, 40, 8), F32, device)
    options = dict(eps=1e-6, backend=backend)
    found = rms_norm_linear(x, norm_weight, weight, bias, weight_offset=0.5, **options)
    assert torch.equal(found, rms_norm_linear(x, norm_weight + 0.5, weight, bias, **options))


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_makes_its_row_nan(op, value, backend, device):
    tensors = op.draw((4, 40, 8), F32, device)
    tensors[0][1, 7] = value
    y = op.public(*tensors, backend=backend)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


@KERNELS_AND_REFERENCE
def test_squares_beyond_fp32_leave_what_rows_of_zeros_give(op, backend, device):
    x, *others = op.draw((4, 40, 8), F32, device)
    found = op.public(1e30 * x, *others, backend=backend)
    norm_bias = others[1] if op.vectors == 2 else torch.zeros(40, device=device)
    expected = F.linear(norm_bias, *others[-2:])
    torch.testing.assert_close(found, expected.expand(4, 8))


@KERNELS_AND_REFERENCE
def test_rows_without_columns_give_the_bias(op, backend, device):
    leaves = [x.requires_grad_() for x in op.draw((3, 0, 4), F32, device)]
    *_, bias = leaves
    y = op.public(*leaves, backend=backend)
    assert torch.equal(y, bias.expand(3, 4))
    *grads, dbias = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert [g.shape for g in grads] == [x.shape for x in leaves[:-1]]
    assert torch.equal(dbias, torch.full((4,), 3.0, device=device))


def test_only_what_is_asked_for_is_computed(op, device, monkeypatch):
    """Without a gradient of x and of the norm no gradient reaches the norm; what it returned, for
    the gradient of weight, comes from its backward pass where that runs.
    """
    from fusewright.norm.norm_linear import launch

    called = []
    for name in ("norm_forward", "norm_backward"):
        run = getattr(launch, name)
        monkeypatch.setattr(
            launch, name, lambda *a, _n=name, _r=run, **k: called.append(_n) or _r(*a, **k)
        )
    wanted = ((0,), ["norm_backward"]), ((-2,), ["norm_forward"]), ((-1,), [])
    for asked, expected in (*wanted, ((0, -2), ["norm_backward"])):
        tensors = op.draw((4, 40, 8), F32, device)
        leaves = [tensors[place].requires_grad_() for place in asked]
        y = op.kernels(*tensors)
        called.clear()
        torch.autograd.grad(y.sum(), leaves)
        assert called == expected


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(5, 40), (3000, 40), (2, 20000)], ids=str)
@pytest.mark.parametrize("center", [True, False])
def test_backward_pass_of_a_norm_writes_what_the_forward_pass_returned(center, shape, device):
    """In one launch, of rows that stay in registers, and of wider ones; of operands with strides of
    their own."""
    from fusewright.norm.row_norm.launch import norm_forward
    from fusewright.norm.row_norm.launch_backward import norm_backward

    rows, cols = shape
    x = torch.randn(rows, 2 * cols, device=device)[:, :cols]
    weight, bias = torch.randn(2, 2 * cols, device=device)[:, ::2]
    bias = bias if center else None
    y, _, mean, rstd = norm_forward(x, None, weight, bias, 1e-6, 0.5, center, dtype=torch.bfloat16)
    operands = torch.randn_like(x), None, x, weight, bias, mean, rstd, 0.5, True, center
    *grads, again = norm_backward(*operands, y_dtype=torch.bfloat16)
    *without, none = norm_backward(*operands)
    assert none is None
    # Contracted or not, it is one rounding of the wide result.
    wide, narrow = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(again, y, rtol=narrow, atol=wide * float(y.abs().max()))
    for grad, expected in zip(grads, without, strict=True):
        assert (grad is None) == (expected is None)
        assert grad is None or torch.equal(grad, expected)


MODULES = [
    (LayerNormLinear, {}, torch.nn.LayerNorm),
    (LayerNormLinear, dict(bias=False, norm_bias=False), torch.nn.LayerNorm),
    (LayerNormLinear, dict(elementwise_affine=False, eps=1e-3), torch.nn.LayerNorm),
    (RMSNormLinear, {}, torch.nn.RMSNorm),
    (RMSNormLinear, dict(bias=False, elementwise_affine=False, eps=1e-3), torch.nn.RMSNorm),
]


@KERNELS_AND_REFERENCE
@pytest.mark.parametrize(("kind", "options", "theirs"), MODULES, ids=str)
def test_modules_compute_what_a_norm_and_a_linear_layer_compute(
    kind, options, theirs, backend, device
):
    module = kind(40, 8, device=device, backend=backend, **options)
    of_norm = dict(eps=module.norm.eps, elementwise_affine=options.get("elementwise_affine", True))
    if theirs is torch.nn.LayerNorm:
        of_norm["bias"] = options.get("norm_bias", True)
    linear = torch.nn.Linear(40, 8, options.get("bias", True), device=device)
    twin = torch.nn.Sequential(
        OrderedDict(norm=theirs(40, **of_norm, device=device), linear=linear)
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    twin.load_state_dict(module.state_dict())
    names = [name for name, _ in module.named_parameters()]

    def call(chosen):
        def forward(x, *parameters):
            named = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(chosen, named, (x,))

        return forward

    x = torch.randn(6, 40, device=device)
    Yardstick(call(twin), [x, *module.parameters()]).check(call(module))


def test_fresh_rms_norm_linear_module_with_an_offset_scales_by_one(device):
    module = RMSNormLinear(40, 8, weight_offset=1.0, device=device, backend="triton")
    x = torch.randn(5, 40, device=device)
    linear = module.linear
    expected = rms_norm_linear(x, None, linear.weight, linear.bias, backend="triton")
    assert torch.equal(module(x), expected)


X, W = torch.zeros(3, 8), torch.zeros(4, 8)
BAD = [
    (lambda: layer_norm_linear(torch.zeros(()), None, None, W), ValueError, "at least one axis"),
    (
        lambda: layer_norm_linear(X, X[0], X, W),
        ValueError,
        r"norm_bias.*\(8,\).*\(3, 8\)",
    ),
    (lambda: layer_norm_linear(X, None, None, W.mT), ValueError, r"\(M, 8\).*got \(8, 4\)"),
    (lambda: rms_norm_linear(X, None, W[0]), ValueError, r"\(M, 8\).*got \(8,\)"),
    (lambda: rms_norm_linear(X, W[0, :7], W), ValueError, r"norm_weight.*\(8,\).*got \(7,\)"),
    (lambda: rms_norm_linear(X, None, W, X[0]), ValueError, r"bias.*\(4,\).*got \(8,\)"),
    (lambda: rms_norm_linear(X, None, W, W[:, 0].half()), ValueError, "float32, got torch.float16"),
    (lambda: rms_norm_linear(X, None, W.double()), ValueError, "both be float64 or neither"),
    (lambda: rms_norm_linear(X, None, W, weight_offset="1"), TypeError, "number, got str"),
    (lambda: layer_norm_linear(X, None, None, W, eps=-1.0), ValueError, "eps must be"),
    (lambda: LayerNormLinear(7, 4)(X), ValueError, "norm_weight must have shape"),
    (lambda: RMSNormLinear(8, 4, backend="cuda"), ValueError, "got 'cuda'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_both_are_the_norm_and_a_product(op, device):
    """Where no kernel does both, to the bit."""
    x, *vectors, weight, bias = op.draw((70, 33, 40), F32, device)
    z = getattr(norm, op.function.removesuffix("_linear"))(x, *vectors, eps=1e-6, backend="triton")
    found = op.kernels(x, *vectors, weight, bias)
    assert torch.equal(found, F.linear(z, weight, bias))
