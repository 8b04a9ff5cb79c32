"""The short convolution and the gated norm of GatedDeltaNet."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from fusewright.deltanet.convolution import launch
from fusewright.deltanet.convolution.short_convolution import short_convolution
from fusewright.deltanet.gated_norm import reference as norm_reference
from fusewright.deltanet.gated_norm.gated_norm import gated_norm
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
OPS = torch.ops.fusewright_deltanet


@dataclass(frozen=True)
class ConvolutionOp:
    """short_convolution on flat lists of tensors: x, the taps and, where there is one, a bias."""

    heads: int = 0
    place: torch.Tensor | None = None

    def having(self, **options) -> ConvolutionOp:
        return replace(self, **options)

    def public(self, x, weight, bias=None, **options):
        return short_convolution(x, weight, bias, heads=self.heads, place=self.place, **options)

    def kernels(self, *tensors):
        return self.public(*tensors, backend="triton")

    def reference(self, *tensors):
        return self.public(*tensors, backend="reference")

    def check(self, tensors):
        Yardstick(self.reference, tensors).check(self.kernels)

    def draw(self, batch, tokens, channels, taps=4, dtype=F32, device="cpu", bias=True):
        state = F64 if dtype == F64 else F32
        draw = functools.partial(torch.randn, device=device, dtype=state)
        vectors = [draw(channels, taps), *([draw(channels)] if bias else [])]
        return [draw(batch, tokens, channels).to(dtype), *vectors]


@pytest.fixture
def op():
    return ConvolutionOp()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(op, heads, dtype, device):
    op.having(heads=heads).check(op.draw(2, 19, 15, 4, dtype, device))


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 40, 7), (1, 5, 300), (3, 2, 4)])
@pytest.mark.parametrize("taps", [1, 3, 4])
def test_every_size_is_as_near_to_fp64_as_torch(op, taps, sizes, device):
    op.check(op.draw(*sizes, taps, F32, device, bias=False))


@pytest.mark.parametrize("length", launch.STRIPS)
def test_every_length_of_strips_is_as_near_to_fp64_as_torch(op, length, monkeypatch, device):
    """Backward; more strips than one program's, and a last one that is not full."""
    monkeypatch.setattr(launch, "STRIPS", (length,))
    monkeypatch.setattr(launch, "convolution_plan", launch.convolution_plan.__wrapped__)
    place = torch.arange(70, device=device) % 33
    op.having(heads=2, place=place).check(op.draw(3, 70, 6, 4, F32, device))


def test_sequences_in_one_row_see_zeros_before_them(op, backend, device):
    tensors = op.draw(1, 21, 6, 4, F32, device)
    place = torch.tensor([*range(2), *range(18), 0], device=device)
    whole = op.having(heads=2, place=place)
    if backend == "triton":
        whole.check(tensors)
    y = whole.public(*tensors, backend=backend)
    for part in (slice(0, 2), slice(2, 20), slice(20, 21)):
        alone = op.having(heads=2).public(tensors[0][:, part], *tensors[1:], backend=backend)
        assert torch.equal(y[:, part], alone)


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
    x, *others = op.having(heads=2).draw(1, 20, 6, 4, F32, device)
    y = op.public(x, *others, backend=backend)
    x[:, 7] = math.nan
    later = op.public(x, *others, backend=backend)
    assert torch.equal(later[:, :7], y[:, :7])
    assert later[:, 7:11].isnan().all()
    assert torch.equal(later[:, 11:], y[:, 11:])


def test_reference_passes_gradcheck(op):
    leaves = [x.requires_grad_() for x in op.draw(1, 5, 4, 3, F64)]
    assert torch.autograd.gradcheck(op.having(heads=2).reference, leaves)
    assert torch.autograd.gradgradcheck(op.having(heads=2).reference, leaves)


@pytest.mark.parametrize("bias", [False, True])
def test_registered_ops_pass_opcheck(op, bias, device):
    x, weight, *others = (t.requires_grad_() for t in op.draw(1, 5, 4, 3, F32, device, bias))
    place = torch.arange(5, device=device)
    tensors = (x, weight, others[0] if bias else None, place, 2)
    torch.library.opcheck(OPS.short_convolution.default, tensors)
    dy = torch.randn_like(x).requires_grad_()
    torch.library.opcheck(OPS.short_convolution_backward.default, (dy, *tensors))


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad, transforms.func_grad_twice],
    ids=lambda transform: transform.__name__,
)
def test_transform_is_right(op, transform, device):
    hold(op.having(heads=2), op.draw(1, 5, 4, 3, F32, device), transform)


def test_same_inputs_same_bits(op, device):
    leaves = [x.requires_grad_() for x in op.draw(2, 19, 15, 4, BF16, device)]

    def everything():
        y = op.having(heads=3).kernels(*leaves)
        return [y, *torch.autograd.grad(y.float().sin().sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in zip(everything(), everything(), strict=True))


def test_without_tokens_all_is_empty_and_taps_have_gradients_of_zero(op, backend, device):
    leaves = [x.requires_grad_() for x in op.draw(2, 0, 4, 3, F32, device)]
    y = op.public(*leaves, backend=backend)
    grads = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == (2, 0, 4)
    assert not any(g.any() for g in grads)


def test_every_kind_of_convolution_has_launches_of_its_own(op, device):
    """The plugin of the tests watches that no launch serves two."""
    for bias, place, state in itertools.product((False, True), (None, 2, 3), (F32, BF16)):
        tensors = op.draw(1, 5, 4, 3, BF16, device, bias)
        if place is not None:
            place = torch.arange(5, device=device) % place
        op.having(place=place).check([tensors[0], *(x.to(state) for x in tensors[1:])])


@pytest.mark.parametrize("backend", ["triton"])
def test_operands_may_be_columns_of_others(op, backend, device):
    x, weight, bias = op.draw(1, 5, 4, 3, F32, device)
    place = torch.arange(5, device=device) % 3
    wide = [torch.stack((t, t + 1.0), -1)[..., 0] for t in (x, weight, bias)]
    spread = torch.stack((place, place + 1), -1)[:, 0]
    y = op.having(place=spread).public(*wide, backend=backend)
    assert torch.equal(y, op.having(place=place).public(x, weight, bias, backend=backend))


@dataclass(frozen=True)
class NormOp:
    """gated_norm on flat lists of tensors: o, weight and, where there is one, a gate."""

    def public(self, o, weight, gate=None, **options):
        return gated_norm(o, weight, gate, 1e-5, **options)

    def kernels(self, *tensors):
        return self.public(*tensors, backend="triton")

    def reference(self, *tensors):
        return self.public(*tensors, backend="reference")

    def draw(self, shape, dtype=F32, device="cpu", gate=True):
        draw = functools.partial(torch.randn, device=device)
        o, z = draw(*shape).to(dtype), draw(*shape).to(dtype)
        return [o, draw(shape[-1]), *([z] if gate else [])]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("gate", [False, True], ids=["norm", "gated"])
@pytest.mark.parametrize("shape", [(2, 3, 2, 12), (1, 1), (70, 40), (2, 0, 5), (2, 3000)])
def test_gated_norm_is_as_near_to_fp64_as_torch(shape, gate, dtype, device):
    op = NormOp()
    tensors = op.draw(shape, dtype, device, gate)
    if 0 not in shape:
        Yardstick(op.reference, tensors).check(op.kernels)
        return
    leaves = [x.requires_grad_() for x in tensors]
    y = op.kernels(*leaves)
    assert y.shape == shape
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), leaves))


def test_every_kind_of_norm_has_launches_of_its_own(device):
    op = NormOp()
    for gate, state in itertools.product((False, True), (F32, BF16)):
        o, weight, *gates = op.draw((3, 5), BF16, device, gate)
        Yardstick(op.reference, [o, weight.to(state), *gates]).check(op.kernels)


def test_gated_norm_passes_gradcheck_and_is_torchs_norm_times_silu():
    o, gate = (torch.randn(2, 3, 4, dtype=F64, requires_grad=True) for _ in range(2))
    weight = torch.randn(4, dtype=F64, requires_grad=True)
    norm = functools.partial(norm_reference.gated_norm, eps=1e-5)
    assert torch.autograd.gradcheck(norm, (o, weight, gate))
    assert torch.autograd.gradgradcheck(norm, (o, weight, gate))
    expected = F.rms_norm(o, (4,), weight, 1e-5)
    torch.testing.assert_close(norm(o, weight, None), expected)
    torch.testing.assert_close(norm(o, weight, gate), expected * F.silu(gate))


@pytest.mark.parametrize("gate", [False, True], ids=["norm", "gated"])
def test_registered_norms_pass_opcheck(gate, device):
    o, weight, *z = (x.requires_grad_() for x in NormOp().draw((2, 3, 5), F32, device, gate))
    tensors = (o, weight, z[0] if gate else None, 1e-5)
    torch.library.opcheck(OPS.gated_norm.default, tensors)
    dy = torch.randn_like(o).requires_grad_()
    torch.library.opcheck(OPS.gated_norm_backward.default, (dy, *tensors))


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad, transforms.func_grad_twice],
    ids=lambda transform: transform.__name__,
)
def test_transform_of_the_norm_is_right(transform, device):
    hold(NormOp(), NormOp().draw((2, 5), F32, device), transform)
