"""feed_forward and FeedForward: values, what is computed and kept, padded storage, training."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fusewright.feed_forward import FeedForward, feed_forward
from fusewright.feed_forward._core.backends import DeviceProperties
from fusewright.feed_forward.perceptron import reference
from fusewright_testkit import Yardstick
from fusewright_testkit.yardstick import as_tuple

from .operations import FEED_FORWARD, GATED

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
OP = FEED_FORWARD
DIM, WIDTH, STORED = 12, 37, 64


def layer_of(backend="triton", device="cpu", width=WIDTH, dtype=None):
    return FeedForward(DIM, width, backend=backend, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (70, 33, 40, 24), (9, 5, 137, 7), (2, 3, 8, 96, 8)], ids=str
)
def test_outputs_and_gradients_are_as_near_to_fp64_as_torch(shape, dtype, device):
    OP.check(OP.draw(shape, dtype, device))


def test_one_row_without_further_axes_is_served(backend, device):
    x, *weights = OP.draw((1, 20, 6, 5), F32, device)
    found = feed_forward(x[0], *weights, backend=backend)
    assert torch.equal(found, feed_forward(x, *weights, backend=backend)[0])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_hidden_units_that_are_no_numbers_are_where_torch_has_them(dtype, backend, device):
    """Of every size, to both sides, and infinite; each by itself on its way to y and back."""
    numbers = [0.0, 1e-3, 1.0, 9.0, 80.0, 100.0, 1e4, 1e30, math.inf, -math.inf, math.nan]
    numbers += [-number for number in numbers[1:8]]
    x = torch.tensor(numbers, device=device).to(dtype).unsqueeze(-1).requires_grad_()
    one = torch.ones(1, 1, device=device, dtype=dtype)
    y = feed_forward(x, one, one, backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    twin = x.detach().float().requires_grad_()
    truth = F.silu(twin)
    (grad,) = torch.autograd.grad(truth, twin, torch.ones_like(truth))
    for a, b in ((y, truth), (dx, grad)):
        b = b.to(dtype)
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a[a.isinf()], b[b.isinf()])


def test_backward_formulas_are_those_of_autograd():
    tensors = [t.requires_grad_() for t in OP.draw((3, 6, 5, 4), F64, "cpu")]
    y = reference.feed_forward(*tensors)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, dy)
    found = as_tuple(reference.feed_forward_backward(dy, *tensors))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 16 * torch.finfo(F64).eps * b.abs().max()


@pytest.mark.parametrize(("asked", "products", "slopes"), [(0, 2, 1), (1, 2, 1), (2, 1, 0)])
def test_only_what_is_asked_for_is_computed(asked, products, slopes, device, monkeypatch):
    from fusewright.feed_forward.perceptron import launch

    called = []
    for name in ("product", "product_of_rows", "silu_backward"):
        run = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *a, _n=name, _r=run: called.append(_n) or _r(*a))
    tensors = OP.draw((4, 20, 6, 5), F32, device)
    tensors[asked].requires_grad_()
    y = OP.kernels(*tensors)
    called.clear()
    torch.autograd.grad(y.sum(), tensors[asked])
    assert called.count("silu_backward") == slopes
    assert len(called) - slopes == products


def test_without_gradients_the_activation_takes_the_place_of_what_it_is_of(device, monkeypatch):
    from fusewright.feed_forward.perceptron import launch

    places = []
    run = launch.silu
    monkeypatch.setattr(launch, "silu", lambda u, h: places.append((u, h)) or run(u, h))
    tensors = OP.draw((4, 20, 6, 5), F32, device)
    y, *nothing = launch.feed_forward_inference(*tensors)
    kept_y, kept_u, kept_h = launch.feed_forward(*tensors)
    assert torch.equal(y, kept_y)
    assert nothing == [None, None]
    (u, h), (before, behind) = places
    assert u is h
    assert kept_u is before
    assert kept_h is behind
    assert torch.equal(kept_u, F.linear(*tensors[:2]))


@pytest.mark.parametrize(
    ("served", "rows", "inner", "cols", "dtype", "capability"),
    [
        (True, 44000, 512, 1376, BF16, 90),
        (True, 44000, 8, 8, F16, 90),
        (False, 2000, 512, 1376, BF16, 90),
        (False, 44000, 520, 1376, BF16, 90),
        (False, 44000, 508, 1376, BF16, 90),
        (False, 44000, 512, 1365, BF16, 90),
        (False, 44000, 512, 0, BF16, 90),
        (True, 2**31 - 2**13, 8, 8, BF16, 90),
        (False, 2**31, 8, 8, BF16, 90),
        (False, 512, 8, 2**31, BF16, 90),
        (False, 44000, 512, 1376, F32, 90),
        (False, 44000, 512, 1376, BF16, 80),
        (False, 44000, 512, 1376, BF16, 100),
    ],
)
def test_epilogue_serves_what_it_can_and_is_faster_for(
    served, rows, inner, cols, dtype, capability, monkeypatch
):
    from fusewright.feed_forward._core import product_hopper

    gpu = DeviceProperties(multiprocessors=132, shared_bytes=227 << 10, capability=capability)
    monkeypatch.setattr(product_hopper, "device_properties", lambda device: gpu)
    monkeypatch.setattr(product_hopper, "interpreted", lambda: False)
    device = torch.device("cuda", 0)
    assert product_hopper.serves(rows, inner, cols, dtype, device, 0.9) is served


@pytest.mark.parametrize("row", [torch.zeros(64, 1).mT, torch.zeros(2, 2, 65)[:1, 0, 1:]])
def test_one_row_is_read_by_a_descriptor_whatever_its_stride_says(row):
    """The stride of an axis of length 1 counts for nothing in a contiguous matrix, and for a
    descriptor.
    """
    from fusewright.feed_forward._core.product_hopper import in_bulk

    row = row.to(BF16)
    assert row.is_contiguous()
    assert in_bulk(row).stride() == (64, 1)
    assert in_bulk(row).data_ptr() % 16 == 0
    matrix = torch.zeros(4, 64)
    assert in_bulk(matrix) is matrix


def test_saved_hidden_layer_of_any_layout_gives_the_same_gradients(device):
    from fusewright.feed_forward.perceptron import launch

    tensors = OP.draw((5, 6, 4, 3), F32, device)
    y, u, h = launch.feed_forward(*tensors)
    expected = launch.feed_forward_backward(y, *tensors, u, h, (True,) * 3)
    strided = (x.mT.contiguous().mT for x in (u, h))
    found = launch.feed_forward_backward(y, *tensors, *strided, (True,) * 3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_layout_gives_the_same_bits(which, device):
    tensors = [t.requires_grad_() for t in OP.draw((40, 24, 16, 32), F32, device)]
    strided = [t.detach().clone().requires_grad_() for t in tensors]
    spaced = torch.stack([tensors[which].detach()] * 2, -1)[..., 0].mT.contiguous().mT
    assert not spaced.is_contiguous()
    strided[which] = spaced.requires_grad_()

    def found(leaves):
        y = OP.kernels(*leaves)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    assert all(torch.equal(a, b) for a, b in zip(found(tensors), found(strided), strict=True))


def test_padding_changes_nothing(backend, device):
    layer = layer_of(backend, device)

    def without_padding(x, hidden_weight, output_weight):
        return F.linear(F.silu(F.linear(x, hidden_weight[:WIDTH])), output_weight[:, :WIDTH])

    inputs = [torch.randn(7, DIM, device=device), *layer.parameters()]
    yardstick = Yardstick(without_padding, inputs)
    yardstick.check(lambda *t: feed_forward(*t, backend=backend))


@pytest.mark.parametrize("op", [FEED_FORWARD, GATED], ids=["feed_forward", "gated"])
@pytest.mark.parametrize(
    ("asked", "kept"), [((0,), "u"), ((1,), "u"), ((2,), "h"), ((0, 2), "uh"), ((0, 1, 2), "uh")]
)
def test_only_what_gradients_that_are_asked_for_read_is_saved(op, asked, kept, device):
    x, weight, output_weight = tensors = op.draw((4, 20, 7, 5), F32, device)
    sizes = {"u": (4, len(weight)), "h": (4, 7)}
    leaves = [tensors[place].requires_grad_() for place in asked]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = op.kernels(*tensors)
    hidden = [t for t in saved if all(t is not given for given in tensors)]
    assert sorted(tuple(t.shape) for t in hidden) == sorted(sizes[name] for name in kept)
    expected = op.reference(x, weight, output_weight)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", [FEED_FORWARD, GATED], ids=["feed_forward", "gated"])
@pytest.mark.parametrize("asked", range(3))
def test_second_derivatives_pass_frozen_operands(op, asked, device):
    tensors = op.draw((4, 6, 5, 3), F32, device)
    leaf = tensors[asked].requires_grad_()
    found = []
    for call in (op.kernels, op.reference):
        first = torch.autograd.grad(call(*tensors).square().sum(), leaf, create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)
