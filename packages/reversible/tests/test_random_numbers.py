"""A layer that is recomputed draws the random numbers of its forward pass again."""

from __future__ import annotations

import pytest
import torch
from fusewright.reversible import MidpointStack
from fusewright.reversible.midpoint.midpoint_stack import MODES, Run
from fusewright.reversible.midpoint.replay import GPU, Generators
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .stacks import DRAWS, WIDTH, Random, make, results, same_bits


def test_numbers_of_every_kind_of_dropout_are_drawn_once():
    found = []
    for mode in MODES:
        stack = make(mode, drop=0.4)
        for layer in stack.layers:
            layer.dropout = nn.Dropout1d(0.4)
        found.append(results(stack, torch.randn(3, 4, WIDTH, generator=torch.manual_seed(2))))
    assert same_bits(found[0], found[1])
    for value, truth in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_random_numbers_of_any_function_are_drawn_again(mode, draw):
    """And the backward pass leaves what is drawn after it as it was."""
    x, found = torch.randn(3, 5, WIDTH), []
    for each in (mode, "plain"):
        torch.manual_seed(5)
        stack = MidpointStack([Random(DRAWS[draw]) for _ in range(6)], mode=each)
        found.append([*results(stack, x), torch.rand(4)])
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_backward_pass_of_layers_that_seed_leaves_generators_as_they_were(mode):
    """All layers but the first end in the state that they began in, though they seed."""

    def seeded(y):
        torch.manual_seed(0)
        return y * torch.randn_like(y)

    x, found = torch.randn(3, WIDTH), []
    for each in (mode, "plain"):
        torch.manual_seed(5)
        stack = MidpointStack([Random(seeded) for _ in range(4)], mode=each)
        start = x.clone().requires_grad_()
        loss = stack(start).x.square().sum()
        torch.manual_seed(7)
        torch.rand(3)
        before = torch.get_rng_state()
        grads = torch.autograd.grad(loss, [start, *stack.parameters()])
        assert torch.equal(torch.get_rng_state(), before)
        found.append([loss.detach(), *grads])
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_states_of_random_numbers_are_kept_where_a_layer_draws(mode):
    layers = [Random(DRAWS["noise"] if number % 2 else torch.sin) for number in range(4)]
    run = Run(MidpointStack(layers, mode=mode), {})
    run.forward(torch.randn(2, WIDTH))
    assert [len(around.random) for around in run.surroundings] == [0, 1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_layers_dropped_by_chance_are_dropped_again(mode):
    def draw(y):
        return torch.zeros_like(y) if torch.rand(()) < 0.5 else y

    x, found = torch.randn(3, WIDTH), []
    for each in (mode, "plain"):
        torch.manual_seed(5)
        stack = MidpointStack([Random(draw) for _ in range(8)], mode=each)
        start = x.clone().requires_grad_()
        stack(start).x.square().sum().backward()
        found.append([start.grad, *(p.grad for p in stack.parameters())])
    dropped = [value is None or not value.any() for value in found[0]]
    assert any(dropped)
    assert not all(dropped)
    for value, truth in zip(*found, strict=True):
        if truth is not None:
            torch.testing.assert_close(value, truth)
        else:
            assert value is None


def test_second_backward_pass_draws_the_same_numbers():
    stack = MidpointStack([Random(DRAWS["noise"]) for _ in range(4)])
    x = torch.randn(3, WIDTH, requires_grad=True)
    loss = stack(x).x.square().sum()
    leaves = [x, *stack.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.rand(7)
    assert same_bits(first, torch.autograd.grad(loss, leaves))


def test_gpu_numbers_are_drawn_again_in_the_graph_that_drew_them_alone(monkeypatch):
    """By what torch says of a capture: seed and place in the graph, both on the host."""
    places, capturing = [0], [True]

    class Generator:
        def get_state(self):
            return torch.tensor([7, places[0]]).view(torch.uint8)

    def backward_after(captured, end, now, captures):
        capturing[0], places[0] = captured, 0
        generators = Generators(torch.device("cuda", 0))
        places[0] = end
        assert set(generators.drawn()) == ({GPU} if end else set())
        capturing[0], places[0] = captures, now
        generators.check_graph()

    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    backward_after(True, 8, 8, True)
    backward_after(True, 2**40, 2**40 + 4, True)
    backward_after(True, 0, 0, True)
    backward_after(False, 8, 0, False)
    for apart in ((True, 8, 4, True), (True, 8, 8, False), (False, 8, 8, True)):
        with pytest.raises(RuntimeError, match="in the CUDA graph of its forward pass"):
            backward_after(*apart)


def test_layers_of_fake_tensors_draw_nothing():
    with FakeTensorMode():
        stack = MidpointStack([Random(DRAWS["noise"]) for _ in range(3)])
        x = torch.randn(2, WIDTH, requires_grad=True)
        stack(x).x.sum().backward()
        assert x.grad.shape == (2, WIDTH)
