"""SwiGLU: values beside torch, padded storage, state dicts, training, compilers."""

from __future__ import annotations

import copy
import pickle
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


@pytest.mark.parametrize(("width", "stored"), [(1, 32), (32, 32), (33, 64), (1365, 1376)])
def test_hidden_width_is_stored_rounded_up_and_zero_beyond(width, stored):
    layer = SwiGLU(4, width)
    assert layer.joint.weight.shape == (2 * stored, 4)
    assert layer.output.weight.shape == (4, stored)
    assert layer.joint.bias is None
    assert layer.output.bias is None
    for half in layer.joint.weight.chunk(2):
        assert not half[width:].any()
        assert half[:width].all()
    assert not layer.output.weight[:, width:].any()
    assert layer.output.weight[:, :width].all()


def test_weights_are_drawn_by_fan_in_of_the_width_that_is_used():
    layer = SwiGLU(100, 400)
    for weight, fan_in in ((layer.joint.weight, 100), (layer.output.weight[:, :400], 400)):
        bound = fan_in**-0.5
        # Of so many uniform numbers, the largest falls short of the bound by a hundredth in one of
        # e^400 draws.
        assert 0.99 * bound < weight.abs().max() <= bound
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    used = layer.output.weight[:, :400] != before["output.weight"][:, :400]
    assert used.float().mean() > 0.99


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_padding_stays_zero_under_training(optimizer, backend, device):
    layer = layer_of(backend, device)
    start = copy.deepcopy(layer.state_dict())
    steps = OPTIMIZERS[optimizer](layer.parameters())
    for _ in range(5):
        x = torch.randn(9, DIM, device=device)
        steps.zero_grad()
        (layer(x) - x.flip(-1)).square().mean().backward()
        assert not any(part.any() for part in gradients_of_padding(layer))
        steps.step()
    assert not any(part.any() for part in layer.padding())
    for name, weight in layer.state_dict().items():
        assert not torch.equal(weight, start[name])


def gradients_of_padding(layer):
    return [
        layer.joint.weight.grad.view(2, STORED, DIM)[:, WIDTH:],
        layer.output.weight.grad[:, WIDTH:],
    ]


def test_state_dict_makes_the_same_layer(device):
    layer, other = layer_of(device=device), layer_of(device=device)
    assert set(layer.state_dict()) == {"joint.weight", "output.weight"}
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, DIM, device=device)
    assert torch.equal(other(x), layer(x))


def stored_weights(layer):
    """As a state dict that was saved with the padding holds them."""
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def test_state_dict_holds_the_weights_in_the_width_of_the_layer():
    layer = layer_of()
    gate, up = (half[:WIDTH] for half in layer.joint.weight.view(2, STORED, DIM))
    state = layer.state_dict()
    assert torch.equal(state["joint.weight"], torch.cat([gate, up]))
    assert torch.equal(state["output.weight"], layer.output.weight[:, :WIDTH])


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("of", [stored_weights, SwiGLU.state_dict], ids=["stored", "in-width"])
def test_weights_are_loaded_with_padding_and_without(of, assign):
    layer, other = layer_of(), layer_of()
    other.load_state_dict(of(layer), assign=assign)
    for weight, expected in zip(other.parameters(), layer.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 9, STORED, STORED + 1])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_weights_of_another_width_are_refused_and_stay_as_they_are(assign, width):
    """Stored as wide, too; alone and in a model."""
    layer, state = layer_of(), layer_of(width=width).state_dict()
    before = copy.deepcopy(state)
    told = rf"size mismatch for joint.weight: .*\[{2 * width}, 12\].* is .*\[{2 * WIDTH}, 12\]"
    with pytest.raises(RuntimeError, match=told):
        layer.load_state_dict(state, assign=assign)
    model = torch.nn.Sequential(layer)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.output\.weight"):
        model.load_state_dict({f"0.{name}": x for name, x in state.items()}, assign=assign)
    for name, weight in state.items():
        assert torch.equal(weight, before[name])


def test_stored_weights_of_a_wider_layer_are_refused():
    with pytest.raises(RuntimeError, match=r"size mismatch for joint\.weight"):
        layer_of().load_state_dict(stored_weights(layer_of(width=WIDTH + 9)))


def test_layer_is_copied_and_pickled_whole():
    layer = layer_of("reference")
    x = torch.randn(3, DIM)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(other) == repr(layer)
        assert torch.equal(other(x), layer(x))
        other.load_state_dict(layer_of().state_dict())
        assert other.state_dict()["output.weight"].shape == (DIM, WIDTH)
        assert not torch.equal(other(x), layer(x))


def test_layer_says_its_widths_and_its_backend():
    shown = repr(layer_of("reference")).splitlines()
    assert f"{DIM}, {WIDTH}, stored_width={STORED}, backend='reference'" in shown[1]


def test_layer_made_on_meta_is_filled_elsewhere(device):
    layer = layer_of(device="meta").to_empty(device=device)
    layer.reset_parameters()
    assert layer(torch.randn(3, DIM, device=device)).isfinite().all()
    assert not any(part.any() for part in layer.padding())


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


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_autocast_gives_the_dtype_of_a_linear_layer(backend, compiles, device):
    torch._dynamo.reset()
    layer = layer_of(backend, device)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    x = torch.randn(6, DIM, device=device, requires_grad=True)
    with torch.autocast(device, BF16):
        y = call(x)
    assert y.dtype == BF16
    leaves = [x, *layer.parameters()]
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    assert [g.dtype for g in grads] == [F32] * 3
    assert all(g.any() for g in grads)


def test_layer_compiles_to_one_graph(device):
    torch._dynamo.reset()
    layer = layer_of(device=device)
    inputs = [torch.randn(6, DIM, device=device), *layer.parameters()]
    compiled = torch.compile(as_function(layer), fullgraph=True, backend="aot_eager")
    Yardstick(reference.swiglu, inputs).check(compiled)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_exported_layer_serves_any_number_of_rows(strict, device):
    layer = layer_of(device=device)
    rows = torch.export.Dim("rows")
    x = torch.randn(5, DIM, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict)
    more = torch.randn(9, DIM, device=device)
    assert torch.equal(program.module()(more), layer(more))


def test_layers_stacked_by_vmap_are_each_itself(device):
    layers = [layer_of(device=device) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(layers)
    x = torch.randn(4, DIM, device=device)

    def one_by_one(x, *weights):
        return torch.stack([reference.swiglu(x, *each) for each in zip(*weights, strict=True)])

    inputs = [x, *(stacked[name].detach() for name in ("joint.weight", "output.weight"))]
    yardstick = Yardstick(one_by_one, inputs)
    yardstick.check(torch.func.vmap(as_function(layers[0]), (None, 0, 0)))
