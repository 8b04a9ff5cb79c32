"""What FeedForward and SwiGLU share: padded storage, state dicts, training, compilers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fusewright.feed_forward import FeedForward, SwiGLU

F32, BF16 = torch.float32, torch.bfloat16
DIM, WIDTH, STORED = 12, 37, 64


@pytest.fixture(params=[FeedForward, SwiGLU], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture
def layer_of(kind):
    def draw(backend="triton", device="cpu", width=WIDTH):
        return kind(DIM, width, backend=backend, device=device)

    return draw


def first_of(layer):
    """The weight of the product of x, ``[blocks, S, d]``."""
    weight = layer.get_parameter(f"{layer.first}.weight")
    return weight.view(layer.blocks, -1, weight.shape[1])


@pytest.mark.parametrize(("width", "stored"), [(1, 32), (32, 32), (33, 64), (1365, 1376)])
def test_hidden_width_is_stored_rounded_up_and_zero_beyond(kind, width, stored):
    layer = kind(4, width)
    first, output = first_of(layer), layer.output.weight
    assert first.shape == (kind.blocks, stored, 4)
    assert output.shape == (4, stored)
    assert {name for name, _ in layer.named_parameters()} == {
        f"{kind.first}.weight",
        "output.weight",
    }
    assert not first[:, width:].any()
    assert first[:, :width].all()
    assert not output[:, width:].any()
    assert output[:, :width].all()


def test_weights_are_drawn_by_fan_in_of_the_width_that_is_used(kind):
    layer = kind(100, 400)
    for weight, fan_in in ((first_of(layer), 100), (layer.output.weight[:, :400], 400)):
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


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_padding_stays_zero_for_a_hundred_steps(optimizer, layer_of, backend, device):
    layer = layer_of(backend, device)
    start = copy.deepcopy(layer.state_dict())
    steps = OPTIMIZERS[optimizer](layer.parameters())
    first = layer.get_submodule(layer.first).weight
    for _ in range(100):
        x = torch.randn(9, DIM, device=device)
        steps.zero_grad()
        (layer(x) - x.flip(-1)).square().mean().backward()
        assert not first.grad.view(layer.blocks, STORED, DIM)[:, WIDTH:].any()
        assert not layer.output.weight.grad[:, WIDTH:].any()
        steps.step()
    # Bits: no zero has become a negative one.
    for part in layer.padding():
        assert not part.contiguous().view(torch.int32).any()
    for name, weight in layer.state_dict().items():
        assert not torch.equal(weight, start[name])


def test_state_dict_makes_the_same_layer(layer_of, device):
    layer, other = layer_of(device=device), layer_of(device=device)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, DIM, device=device)
    assert torch.equal(other(x), layer(x))


def stored_weights(layer):
    """As a state dict that was saved with the padding holds them."""
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def weights_in_width(layer):
    return layer.state_dict()


def test_state_dict_holds_the_weights_in_the_width_of_the_layer(layer_of):
    layer = layer_of()
    state = layer.state_dict()
    assert set(state) == {f"{layer.first}.weight", "output.weight"}
    assert torch.equal(state[f"{layer.first}.weight"], first_of(layer)[:, :WIDTH].flatten(0, 1))
    assert torch.equal(state["output.weight"], layer.output.weight[:, :WIDTH])


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("of", [stored_weights, weights_in_width], ids=["stored", "in-width"])
def test_weights_are_loaded_with_padding_and_without(of, assign, layer_of):
    layer, other = layer_of(), layer_of()
    other.load_state_dict(of(layer), assign=assign)
    for weight, expected in zip(other.parameters(), layer.parameters(), strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 9, STORED, STORED + 1])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_weights_of_another_width_are_refused_and_stay_as_they_are(assign, width, layer_of):
    """Stored as wide, too; alone and in a model."""
    layer, state = layer_of(), layer_of(width=width).state_dict()
    before = copy.deepcopy(state)
    rows = layer.blocks * width, layer.blocks * WIDTH
    told = rf"size mismatch for {layer.first}\.weight: .*\[{rows[0]}, 12\].* is .*\[{rows[1]}, 12\]"
    with pytest.raises(RuntimeError, match=told):
        layer.load_state_dict(state, assign=assign)
    model = torch.nn.Sequential(layer)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.output\.weight"):
        model.load_state_dict({f"0.{name}": x for name, x in state.items()}, assign=assign)
    for name, weight in state.items():
        assert torch.equal(weight, before[name])


def test_stored_weights_of_a_wider_layer_are_refused(layer_of):
    layer = layer_of()
    with pytest.raises(RuntimeError, match=rf"size mismatch for {layer.first}\.weight"):
        layer.load_state_dict(stored_weights(layer_of(width=WIDTH + 9)))


def test_layer_is_copied_and_pickled_whole(layer_of):
    layer = layer_of("reference")
    x = torch.randn(3, DIM)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(other) == repr(layer)
        assert torch.equal(other(x), layer(x))
        other.load_state_dict(layer_of().state_dict())
        assert other.state_dict()["output.weight"].shape == (DIM, WIDTH)
        assert not torch.equal(other(x), layer(x))


def test_layer_says_its_widths_and_its_backend(layer_of):
    shown = repr(layer_of("reference")).splitlines()
    assert f"{DIM}, {WIDTH}, stored_width={STORED}, backend='reference'" in shown[1]


def test_layer_made_on_meta_is_filled_elsewhere(layer_of, device):
    layer = layer_of(device="meta").to_empty(device=device)
    layer.reset_parameters()
    assert layer(torch.randn(3, DIM, device=device)).isfinite().all()
    assert not any(part.any() for part in layer.padding())


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_autocast_gives_the_dtype_of_a_linear_layer(layer_of, backend, compiles, device):
    torch._dynamo.reset()
    layer = layer_of(backend, device)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    x = torch.randn(6, DIM, device=device, requires_grad=True)
    with torch.autocast(device, BF16):
        y = call(x)
    assert y.dtype == BF16
    grads = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
    assert [g.dtype for g in grads] == [F32] * 3
    assert all(g.any() for g in grads)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_exported_layer_serves_any_number_of_rows(strict, layer_of, device):
    layer = layer_of(device=device)
    rows = torch.export.Dim("rows")
    x = torch.randn(5, DIM, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict)
    more = torch.randn(9, DIM, device=device)
    assert torch.equal(program.module()(more), layer(more))
