"""SwiGLU: values beside torch, padded storage, state dicts, training, compilers."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from fusewright.feed_forward import SwiGLU
from fusewright.feed_forward.swiglu import reference
from fusewright_testkit import Yardstick
from torch.fx.experimental.proxy_tensor import make_fx

from .operations import GATED

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DIM, WIDTH, STORED = 12, 37, 64


def layer_of(backend="triton", device="cpu", width=WIDTH, dtype=None):
    return SwiGLU(DIM, width, backend=backend, device=device, dtype=dtype)


def as_function(layer):
    """The layer as a function of its input and its weights."""

    def call(x, joint_weight, output_weight):
        weights = {"joint.weight": joint_weight, "output.weight": output_weight}
        return torch.func.functional_call(layer, weights, (x,))

    return call


def three_products(x, joint_weight, output_weight):
    """The layer as its paper writes it, each matrix for itself and without padding."""
    gate, up = (weight[:WIDTH] for weight in joint_weight.view(2, STORED, DIM))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), output_weight[:, :WIDTH])


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("shape", [(DIM,), (5, DIM), (2, 3, DIM), (0, DIM)])
def test_values_and_gradients_are_as_near_to_fp64_as_torch(shape, dtype, device):
    layer = layer_of(device=device, dtype=dtype)
    inputs = [torch.randn(shape, device=device).to(dtype), *layer.parameters()]
    Yardstick(reference.swiglu, inputs).check(as_function(layer))


def test_values_and_gradients_in_bf16_are_as_near_to_fp64_as_torch(backend, device):
    layer = layer_of(backend, device, dtype=BF16)
    inputs = [torch.randn(40, DIM, device=device).to(BF16), *layer.parameters()]
    Yardstick(reference.swiglu, inputs).check(as_function(layer))


def test_padding_changes_nothing(backend, device):
    layer = layer_of(backend, device)
    inputs = [torch.randn(7, DIM, device=device), *layer.parameters()]
    Yardstick(three_products, inputs).check(as_function(layer))


def test_gradient_of_the_joint_product_is_written_at_once(device):
    """Halves joined by autograd would be one more pass over the largest tensor."""
    layer = layer_of(device=device)

    def step(x, joint_weight, output_weight):
        leaves = (x, joint_weight, output_weight)
        return torch.autograd.grad(as_function(layer)(*leaves).square().sum(), leaves)

    inputs = [torch.randn(5, DIM, device=device).requires_grad_(), *layer.parameters()]
    code = make_fx(step)(*inputs).code
    assert "fusewright_feed_forward.gated_feed_forward_backward.default" in code
    for joining in ("cat", "slice_backward", "select_backward", "split", "narrow", "copy", "clone"):
        assert joining not in code


@pytest.mark.parametrize(("asked", "products", "slopes"), [(0, 2, 1), (1, 2, 1), (2, 1, 0)])
def test_only_what_is_asked_for_is_computed(asked, products, slopes, device, monkeypatch):
    from fusewright.feed_forward.gating import launch as gating
    from fusewright.feed_forward.swiglu import launch

    called = []

    def count(module, name):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a: called.append(name) or run(*a))

    for module, name in (
        (launch, "product"),
        (launch, "product_of_rows"),
        (gating, "silu_mul_halves_backward"),
    ):
        count(module, name)
    tensors = GATED.draw((4, 20, 6, 5), F32, device)
    tensors[asked].requires_grad_()
    y = GATED.kernels(*tensors)
    called.clear()
    torch.autograd.grad(y.sum(), tensors[asked])
    assert called.count("silu_mul_halves_backward") == slopes
    assert len(called) - slopes == products


def test_backward_formulas_are_those_of_autograd():
    tensors = [t.requires_grad_() for t in GATED.draw((3, 6, 5, 4), torch.float64, "cpu")]
    y = reference.swiglu(*tensors)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, tensors, dy)
    for a, b in zip(reference.swiglu_backward(dy, *tensors), expected, strict=True):
        assert (a - b).abs().max() <= 16 * torch.finfo(torch.float64).eps * b.abs().max()


def test_without_gradients_the_joint_product_is_freed_before_the_last_product(device, monkeypatch):
    from fusewright.feed_forward.swiglu import gated_feed_forward, launch

    assert gated_feed_forward._forward.inference[True] is launch.gated_feed_forward_inference
    run, freed = launch.linear, []

    def linear(x, weight):
        freed.extend(result() is None for result in results)
        y = run(x, weight)
        results.append(weakref.ref(y))
        return y

    results: list[weakref.ref] = []
    monkeypatch.setattr(launch, "linear", linear)
    tensors = GATED.draw((4, 20, 6, 5), F32, device)
    y, *nothing = launch.gated_feed_forward_inference(*tensors)
    assert nothing == [None, None]
    assert freed == [True]
    assert torch.equal(y, launch.gated_feed_forward(*tensors)[0])


def test_joint_product_alone_is_saved_of_the_hidden_layer(device):
    layer = layer_of(device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        layer(torch.randn(5, DIM, device=device))
    # The gated layer is what the output's gradient needs; no activation beside it.
    assert saved.count((5, 2 * STORED)) == 1
    assert saved.count((5, STORED)) == 1


def test_layer_compiles_to_one_graph(device):
    torch._dynamo.reset()
    layer = layer_of(device=device)
    inputs = [torch.randn(6, DIM, device=device), *layer.parameters()]
    compiled = torch.compile(as_function(layer), fullgraph=True, backend="aot_eager")
    Yardstick(reference.swiglu, inputs).check(compiled)


def test_layers_stacked_by_vmap_are_each_itself(device):
    layers = [layer_of(device=device) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(layers)
    x = torch.randn(4, DIM, device=device)

    def one_by_one(x, *weights):
        return torch.stack([reference.swiglu(x, *each) for each in zip(*weights, strict=True)])

    inputs = [x, *(stacked[name].detach() for name in ("joint.weight", "output.weight"))]
    yardstick = Yardstick(one_by_one, inputs)
    yardstick.check(torch.func.vmap(as_function(layers[0]), (None, 0, 0)))
