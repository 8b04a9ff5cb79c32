"""The short convolution and the gated norm of GatedDeltaNet."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fusewright.deltanet.convolution import launch
from fusewright.deltanet.convolution.short_convolution import short_convolution
from fusewright_testkit import transforms
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.transforms import hold

from .operations import CONVOLUTION, NORM, NormOp

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture
def op():
    return CONVOLUTION


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(op, heads, dtype, device):
    replace(op, heads=heads).check(op.draw(2, 19, 15, 4, dtype, device))


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 40, 7), (1, 5, 300), (3, 2, 4)])
@pytest.mark.parametrize("taps", [1, 3, 4])
def test_every_size_is_as_near_to_fp64_as_torch(op, taps, sizes, device):
    op = replace(op, bias=False)
    op.check(op.draw(*sizes, taps, F32, device))


@pytest.mark.parametrize("length", launch.STRIPS)
def test_every_length_of_strips_is_as_near_to_fp64_as_torch(op, length, monkeypatch, device):
    """Backward; more strips than one program's, and a last one that is not full."""
    monkeypatch.setattr(launch, "STRIPS", (length,))
    monkeypatch.setattr(launch, "convolution_plan", launch.convolution_plan.__wrapped__)
    replace(op, heads=2, period=33).check(op.draw(3, 70, 6, 4, F32, device))


def test_sequences_in_one_row_see_zeros_before_them(op, backend, device):
    tensors = op.draw(1, 21, 6, 4, F32, device)
    place = torch.tensor([*range(2), *range(18), 0], device=device)
    op = replace(op, heads=2)
    if backend == "triton":
        op.check(tensors, place=place)
    y = op.public(*tensors, place=place, backend=backend)
    for part in (slice(0, 2), slice(2, 20), slice(20, 21)):
        alone = op.public(tensors[0][:, part], *tensors[1:], backend=backend)
        if backend == "triton":
            assert torch.equal(y[:, part], alone)
        else:
            # torch's convolution may add in another order for another length.
            torch.testing.assert_close(y[:, part], alone)


def test_it_is_torchs_convolution(op, backend, device):
    x, weight, bias = op.draw(2, 9, 6, 3, F32, device)
    y = op.public(x, weight, bias, backend=backend)
    expected = F.conv1d(F.pad(x.mT, (2, 0)), weight[:, None], bias, groups=6).mT
    torch.testing.assert_close(y, F.silu(expected))


def test_history_is_what_came_before(op):
    x, weight, bias = op.draw(2, 9, 6, 4)
    y = op.public(x, weight, bias)
    late = short_convolution(x[:, 5:], weight, bias, history=x[:, 2:5])
    torch.testing.assert_close(late, y[:, 5:])


def test_future_token_changes_no_past_output(op, backend, device):
    x, *others = op.draw(1, 20, 6, 4, F32, device)
    y = op.public(x, *others, backend=backend)
    x[:, 7] = math.nan
    later = op.public(x, *others, backend=backend)
    assert torch.equal(later[:, :7], y[:, :7])
    assert later[:, 7:11].isnan().all()
    assert torch.equal(later[:, 11:], y[:, 11:])


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad, transforms.func_grad_twice],
    ids=lambda transform: transform.__name__,
)
@pytest.mark.parametrize("op", [replace(CONVOLUTION, heads=2), NORM], ids=lambda op: op.name)
def test_transform_is_right(op, transform, device):
    hold(op, op.sample(op.small, F32, device), transform)


def test_same_inputs_same_bits(op, device):
    leaves = [x.requires_grad_() for x in op.draw(2, 19, 15, 4, BF16, device)]
    one, other = (everything(replace(op, heads=3).kernels, leaves) for _ in range(2))
    assert same_bits(one, other)


def test_without_tokens_all_is_empty_and_taps_have_gradients_of_zero(op, backend, device):
    leaves = [x.requires_grad_() for x in op.draw(2, 0, 4, 3, F32, device)]
    y = op.public(*leaves, backend=backend)
    grads = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == (2, 0, 4)
    assert not any(g.any() for g in grads)


def test_every_kind_of_convolution_has_launches_of_its_own(op, device):
    """The plugin of the tests watches that no launch serves two."""
    for bias, period, state in itertools.product((False, True), (0, 2, 3), (F32, BF16)):
        one = replace(op, bias=bias, period=period)
        x, *others = one.draw(1, 5, 4, 3, BF16, device)
        one.check([x, *(t.to(state) for t in others)])


def test_operands_may_be_columns_of_others(op, device):
    x, weight, bias = op.draw(1, 5, 4, 3, F32, device)
    place = torch.arange(5, device=device) % 3
    wide = [torch.stack((t, t + 1.0), -1)[..., 0] for t in (x, weight, bias)]
    spread = torch.stack((place, place + 1), -1)[:, 0]
    y = op.kernels(*wide, place=spread)
    assert torch.equal(y, op.kernels(x, weight, bias, place=place))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("gate", [False, True], ids=["norm", "gated"])
@pytest.mark.parametrize("shape", [(2, 3, 2, 12), (1, 1), (70, 40), (2, 0, 5), (2, 3000)])
def test_gated_norm_is_as_near_to_fp64_as_torch(shape, gate, dtype, device):
    op = NormOp(gate)
    tensors = op.draw(shape, dtype, device)
    if 0 not in shape:
        op.check(tensors)
        return
    leaves = [x.requires_grad_() for x in tensors]
    y = op.kernels(*leaves)
    assert y.shape == shape
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), leaves))


def test_every_kind_of_norm_has_launches_of_its_own(device):
    for gate, state in itertools.product((False, True), (F32, BF16)):
        op = NormOp(gate)
        o, weight, *gates = op.draw((3, 5), BF16, device)
        op.check([o, weight.to(state), *gates])


def test_gated_norm_is_torchs_norm_times_silu():
    o, weight, gate = NORM.draw((2, 3, 4), F64)
    expected = F.rms_norm(o, (4,), weight, 1e-5)
    torch.testing.assert_close(NORM.reference(o, weight), expected)
    torch.testing.assert_close(NORM.reference(o, weight, gate), expected * F.silu(gate))
