"""silu_linear: values, dtypes, what is launched, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.feed_forward import silu_linear
from fusewright.feed_forward.narrow import launch, reference

from .operations import NARROW

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
OP = NARROW
# One row and column, tiles that are not full, several blocks of rows for a program; leading axes.
SHAPES = [(1, 1, 1), (70, 11, 140), (5000, 3, 20), (40, 64, 33), (2, 3, 20, 8)]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(shape, dtype, device):
    OP.check(OP.draw(shape, dtype, device))


def test_the_product_is_in_fp32_whatever_the_result_is_rounded_to(backend, device):
    """The second row's u is that of the first but for an amount that bf16 has no place for."""
    x = torch.tensor([[4.0, 1.0], [4.0, 1.0 + 2.0**-12]], device=device)
    weight = torch.tensor([[0.25, -1.0]], device=device)
    with torch.autocast(x.device.type, BF16):
        h = silu_linear(x, weight, dtype=BF16, backend=backend)
    assert h.dtype == BF16
    assert h[0] == 0.0
    truth = F.silu(F.linear(x.double(), weight.double()))
    assert (h - truth).abs().max() <= torch.finfo(BF16).eps * truth.abs().max()


@pytest.mark.parametrize("result", [F32, BF16, F16])
def test_gradients_of_a_rounded_result_are_those_of_fp32(result, backend, device):
    leaves = [t.requires_grad_() for t in OP.draw((70, 11, 40), F32, device)]
    h = silu_linear(*leaves, dtype=result, backend=backend)
    dh = torch.randn_like(h)
    found = torch.autograd.grad(h, leaves, dh)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = torch.autograd.grad(F.silu(F.linear(*wide)), wide, dh.double())
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == F32
        assert (a - b).norm() <= 16 * torch.finfo(F32).eps * b.norm()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e38, 200.0, -200.0])
def test_special_values_stay_in_their_rows_and_are_where_torch_has_them(value, backend, device):
    x, weight = OP.draw((70, 11, 40), F32, device)
    clean = silu_linear(x, weight, backend=backend)
    x[65, 7] = value
    found, truth = silu_linear(x, weight, backend=backend), F.silu(F.linear(x, weight))
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.equal(found[found.isinf()], truth[truth.isinf()])
    others = torch.arange(70, device=device) != 65
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(("inner", "launches"), [(64, 2), (65, 0)])
def test_kernels_serve_up_to_64_columns(inner, launches, device, monkeypatch):
    made = []
    for name in ("plan", "plan_backward"):
        run = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *a, _run=run: made.append(a) or _run(*a))
    leaves = [t.requires_grad_() for t in OP.draw((9, inner, 6), F32, device)]
    OP.kernels(*leaves).sum().backward()
    assert len(made) == launches
    OP.check([t.detach() for t in leaves])


def test_backward_formulas_are_those_of_autograd():
    tensors = [t.requires_grad_() for t in OP.draw((3, 6, 5), F64, "cpu")]
    h = reference.silu_linear(*tensors, F64)
    dh = torch.randn_like(h)
    expected = torch.autograd.grad(h, tensors, dh)
    found = reference.silu_linear_backward(dh, *tensors)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 16 * torch.finfo(F64).eps * b.abs().max()


@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
    [
        (torch.ones(()), torch.ones(2, 3), {}, ValueError, "x must have at least one axis"),
        (torch.ones(2, 3), torch.ones(2, 4), {}, ValueError, r"shape \(F, 3\).*got \(2, 4\)"),
        (torch.ones(2, 3), torch.ones(3), {}, ValueError, r"shape \(F, 3\).*got \(3,\)"),
        (torch.ones(2, 3), torch.ones(2, 3).half(), {}, ValueError, "weight must have x's dtype"),
        (torch.ones(2, 3).int(), torch.ones(2, 3), {}, TypeError, "x must be float32"),
        (torch.ones(2, 3), torch.ones(2, 3), dict(dtype=torch.int32), TypeError, "got torch.int32"),
    ],
    ids=["no axis", "columns", "vector", "dtypes", "integers", "result"],
)
def test_what_does_not_fit_is_refused(x, weight, options, error, message):
    with pytest.raises(error, match=message):
        silu_linear(x, weight, **options)
