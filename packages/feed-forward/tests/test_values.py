"""What gating computes beyond closeness: special values, precision of what is between."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.feed_forward import silu_mul
from fusewright.feed_forward.gating import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.yardstick import as_tuple
from torch.func import vmap

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF, NAN = math.inf, math.nan
MAGNITUDES = (0.0, 1e-30, 1e-3, 1.0, 9.0, 80.0, 100.0, 1e4, 1e30, 3e38, INF)


def grid(dtype, device):
    """gate, up and dy: every combination of special values of gate with a few of the others."""
    # Triton's interpreter reads subnormal bf16 as zero.
    tiny = 0.0 if dtype == BF16 and device == "cpu" else 1e-40
    gates = [sign * number for number in (*MAGNITUDES, tiny) for sign in (1.0, -1.0)]
    others = (0.0, 1.0, -tiny, -3.0, 1e30, INF, NAN)
    combinations = list(itertools.product([*gates, NAN], others, others))
    # A result a row: the yardstick's slack follows the row's largest number.
    return torch.tensor(combinations, device=device).to(dtype).T.unsqueeze(-1).unbind(0)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_special_values_give_what_torch_gives_and_pass_its_gradients(dtype, device):
    gate, up, dy = grid(dtype, device)
    yardstick = Yardstick(reference.silu_mul, [gate, up], [dy])
    yardstick.check(lambda *t: silu_mul(*t, backend="triton"))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_nan_and_infinity_are_where_the_formula_of_torch_has_them(dtype, backend, device):
    gate, up, _ = (t.float() for t in grid(dtype, device))
    expected = (F.silu(gate) * up).to(dtype)
    y = silu_mul(gate.to(dtype), up.to(dtype), backend=backend)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y[y.isinf()], expected[expected.isinf()])


def test_elements_do_not_see_one_another(op, device):
    tensors = [t.requires_grad_() for t in op.draw((5, 24), F32, device)]
    with_nan = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        with_nan[0][2, 7] = NAN

    def gating(leaves):
        y = op.kernels(*leaves)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    for found, truth in zip(gating(with_nan), gating(tensors), strict=True):
        is_nan = found.isnan()
        assert is_nan[2, 7]
        assert is_nan.sum() == (2 if found.shape[-1] == 48 else 1)
        assert torch.equal(found[~is_nan], truth[~is_nan])


def test_activation_is_not_rounded_before_the_product(device):
    """SiLU of gates like these is subnormal in fp16."""
    gate = (-15 - torch.rand(64, 32, device=device)).to(F16)
    up = (1000 * torch.randn(64, 32, device=device)).to(F16)
    yardstick = Yardstick(reference.silu_mul, [gate, up])
    yardstick.check(lambda *t: silu_mul(*t, backend="triton"))
    with pytest.raises(AssertionError, match="error"):
        yardstick.check(lambda gate, up: F.silu(gate) * up)


def test_gate_of_zero_passes_half_of_up_to_its_gradient(backend, device):
    gate = torch.zeros(9, device=device, requires_grad=True)
    up = torch.randn(9, device=device, requires_grad=True)
    y = silu_mul(gate, up, backend=backend)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    assert not y.any()
    assert not dup.any()
    assert torch.equal(dgate, up.detach() / 2)


def test_open_gate_passes_up_as_it_is(backend, device):
    gate = torch.full((9,), 128.0, device=device)
    up = torch.randn(9, device=device)
    assert torch.equal(silu_mul(gate, up, backend=backend), 128 * up)


def test_backward_formulas_are_those_of_autograd(op):
    tensors = [t.requires_grad_() for t in op.draw((3, 6), F64, "cpu")]
    y = op.reference(*tensors)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, dy)
    found = as_tuple(getattr(reference, f"{op.name}_backward")(dy, *tensors))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 8 * torch.finfo(F64).eps * b.abs().max()


def test_mapping_over_single_numbers_is_right(device):
    yardstick = Yardstick(reference.silu_mul, [*torch.randn(2, 7, device=device)])
    yardstick.check(vmap(lambda gate, up: silu_mul(gate, up, backend="triton")))
