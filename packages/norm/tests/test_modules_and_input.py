"""The modules beside torch's own, documented values, and what bad input is answered with."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fusewright import norm
from fusewright.norm import LayerNorm, RMSNorm, RMSNormGated, rms_norm_gated
from fusewright_testkit import Yardstick
from fusewright_testkit.conformance.input import NothingRuns

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PAIRS = [(RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm)]
ARGUMENTS = [
    dict(normalized_shape=40),
    dict(normalized_shape=[4, 10]),
    dict(normalized_shape=(40,), eps=1e-3),
    dict(normalized_shape=40, elementwise_affine=False),
    dict(normalized_shape=40, dtype=BF16),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_modules_compute_what_torch_computes(pair, arguments, backend, device):
    ours, theirs = pair
    module = ours(**arguments, device=device, backend=backend)
    twin = theirs(**arguments, device=device)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    twin.load_state_dict(module.state_dict())
    module.load_state_dict(twin.state_dict())
    assert isinstance(module, theirs)
    dtype = arguments.get("dtype", F32)
    x = torch.randn(6, *module.normalized_shape, device=device).to(dtype)
    names = [name for name, _ in module.named_parameters()]

    def call(chosen):
        def forward(x, *parameters):
            named = dict(zip(names, parameters, strict=True))
            wide = copy.deepcopy(chosen).to(x.dtype)
            return torch.func.functional_call(wide, named, (x,))

        return forward

    Yardstick(call(twin), [x, *module.parameters()]).check(call(module))


def test_layer_norm_module_without_bias_has_none(device):
    assert LayerNorm(8, bias=False, device=device).bias is None


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_fresh_rms_norm_module_scales_by_one(weight_offset, device):
    module = RMSNorm(64, weight_offset=weight_offset, backend="triton", device=device)
    x = torch.randn(5, 64, device=device)
    assert torch.equal(module(x), norm.rms_norm(x, backend="triton"))
    assert bool((module.weight == 1.0 - weight_offset).all())


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shape", [40, (4, 10)], ids=str)
def test_gated_module_is_its_function(shape, activation, device):
    module = RMSNormGated(shape, 1e-5, activation=activation, backend="triton", device=device)
    torch.nn.init.normal_(module.weight)
    x, gate = torch.randn(2, 6, *module.normalized_shape, device=device)
    options = dict(eps=1e-5, activation=activation, backend="triton")
    expected = rms_norm_gated(
        x.view(6, 40), gate.view(6, 40), module.weight.view(40), **options
    ).view_as(x)
    assert torch.equal(module(x, gate), expected)
    other = RMSNorm(shape)
    other.load_state_dict(module.state_dict())
    assert f"activation={activation!r}" in repr(copy.deepcopy(module))


@pytest.mark.parametrize(
    "module", [RMSNorm(8, weight_offset=1.0), LayerNorm(8, backend="reference")]
)
def test_modules_are_copied_and_pickled_whole(module):
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == repr(module)
        x = torch.randn(3, 8)
        assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_extreme_values_give_what_the_reference_gives(op, value, dtype, device):
    tensors = op.draw((4, 40), dtype, device)
    tensors[0][1] *= value
    tensors[0][2, 3] = value
    with torch.no_grad():
        found, truth = op.first(op.kernels(*tensors)), op.first(op.reference(*tensors))
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found.isinf(), truth.isinf())


X = torch.zeros(3, 8)
BAD = [
    (lambda: norm.rms_norm(torch.zeros(())), ValueError, "at least one axis"),
    (lambda: norm.layer_norm(torch.zeros(3, 8, dtype=torch.complex64)), TypeError, "complex64"),
    (lambda: norm.rms_norm(X, torch.zeros(7)), ValueError, r"shape \(8,\).*got \(7,\)"),
    (lambda: norm.rms_norm(X, torch.zeros(1, 8)), ValueError, r"got \(1, 8\)"),
    (lambda: norm.layer_norm(X, torch.zeros(8), torch.zeros(9)), ValueError, "bias must have"),
    (lambda: norm.add_rms_norm(X, torch.zeros(3, 9)), ValueError, r"shape \(3, 8\).*\(3, 9\)"),
    (lambda: norm.add_rms_norm(X, X.half()), ValueError, "dtype torch.float32.*float16"),
    (lambda: norm.add_layer_norm(X, torch.zeros(3, 9)), ValueError, r"\(3, 8\).*\(3, 9\)"),
    (lambda: norm.add_layer_norm(X, X, X), ValueError, "weight"),
    (lambda: norm.rms_norm_gated(X, X[0]), ValueError, r"gate must have.*\(3, 8\).*\(8,\)"),
    (lambda: norm.rms_norm_gated(X, X.half()), ValueError, "gate must have x's dtype"),
    (lambda: norm.rms_norm_gated(X, X, activation="swish"), ValueError, '"silu" or "sigmoid"'),
    (lambda: RMSNormGated(8, activation="gelu"), ValueError, "got 'gelu'"),
    (lambda: RMSNormGated(8)(X, X[:2]), ValueError, r"gate must have x's shape \(3, 8\)"),
    (lambda: norm.rms_norm(X, eps=-1.0), ValueError, "eps must be"),
    (lambda: norm.layer_norm(X, eps=float("nan")), ValueError, "eps must be"),
    (lambda: norm.rms_norm(X, eps="a"), TypeError, "eps must be a number, got str"),
    (lambda: norm.rms_norm(X, eps=True), TypeError, "eps must be a number, got bool"),
    (lambda: norm.layer_norm(X, eps=None), TypeError, "eps must be a number, got NoneType"),
    (lambda: norm.layer_norm(X, eps=torch.zeros(())), TypeError, "got Tensor"),
    (lambda: norm.rms_norm(X, weight_offset=1j), TypeError, "weight_offset.*complex"),
    (lambda: norm.add_rms_norm(X, X, weight_offset=X), TypeError, "weight_offset.*Tensor"),
    (lambda: norm.rms_norm(X, weight_offset=float("inf")), ValueError, "finite number, got inf"),
    (lambda: norm.sinkhorn_knopp(X), ValueError, r"square matrices.*got shape \(3, 8\)"),
    (lambda: norm.sinkhorn_knopp(X[0]), ValueError, r"square matrices.*got shape \(8,\)"),
    (lambda: norm.sinkhorn_knopp(X[:, :3], iterations=0), ValueError, "at least 1, got 0"),
    (lambda: norm.sinkhorn_knopp(X[:, :3], iterations=2.0), TypeError, "whole number, got float"),
    (lambda: norm.sinkhorn_knopp(X[:, :3], iterations=True), TypeError, "whole number, got bool"),
    (lambda: norm.sinkhorn_knopp(X[:, :3], eps=-1e-6), ValueError, "eps must be"),
    (lambda: norm.sinkhorn_knopp(X[:, :3], domain="exp"), ValueError, '"linear" or "log", got'),
    (
        lambda: norm.sinkhorn_knopp(torch.zeros(65, 65), backend="triton"),
        RuntimeError,
        "n up to 64, not 65",
    ),
    (lambda: RMSNorm(7)(X), ValueError, r"must be \(7,\), got x of shape \(3, 8\)"),
    (lambda: LayerNorm((2, 3, 8))(X), ValueError, r"must be \(2, 3, 8\)"),
    (lambda: RMSNorm(8)([1.0]), TypeError, "x must be a tensor, got list"),
    (lambda: RMSNorm(()), ValueError, "at least one axis"),
    (lambda: LayerNorm(8, backend="cuda"), ValueError, "got 'cuda'"),
    (lambda: RMSNorm(8, weight_offset="1"), TypeError, "weight_offset must be a number, got str"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_told_what_was_wanted_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refused_number_touches_no_memory(op, device):
    tensors = op.draw((3, 8), F32, device)
    with NothingRuns(), pytest.raises(ValueError, match="eps must be"):
        op.kernels(*tensors, eps=-1.0)


def test_more_rows_than_the_kernels_count_are_refused():
    pytest.importorskip("triton", reason="plans are made for Triton's kernels")
    from fusewright.norm.common import rows

    assert rows.count_rows((rows.MAX_ROWS, 1)) == rows.MAX_ROWS
    with pytest.raises(ValueError, match="rows, got 2147483648"):
        rows.count_rows((2**31, 1))
