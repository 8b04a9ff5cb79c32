"""What a stack saves for its backward pass, and for how long; a backward pass uses no other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from fusewright.reversible import MidpointStack, Tape
from fusewright.reversible.midpoint import midpoint_stack
from fusewright.reversible.midpoint.midpoint_stack import MODES
from torch.func import functional_call

from .stacks import WIDTH, Force, make, same_bits


@pytest.fixture
def uncollected():
    """What is let go of is let go of at once, not by the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_choices_are_counted_and_kept_once():
    stack = make(chooses=True)
    passed = stack(torch.randn(2, WIDTH, requires_grad=True))
    assert passed.tape_bytes == 5 * WIDTH * 8
    assert make()(torch.randn(2, WIDTH, requires_grad=True)).tape_bytes == 0
    with torch.no_grad():
        assert stack(torch.randn(2, WIDTH)).tape_bytes == 0


def test_what_is_kept_in_several_places_is_counted_once():
    chosen = torch.randperm(WIDTH)
    stack = make(chooses=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_: chosen)
        assert stack(torch.randn(2, WIDTH, requires_grad=True)).tape_bytes == WIDTH * 8


def test_what_is_kept_goes_with_the_backward_pass(uncollected):
    """While the loss is still held, and with all the rest once it is not."""
    stack = make(chooses=True)
    kept = []
    record = Tape.record

    def recorded(tape, choice):
        kept.append(weakref.ref(choice))
        record(tape, choice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "record", recorded)
        for _ in range(2):
            kept.clear()
            loss = stack(torch.randn(2, WIDTH)).x.sum()
            here = weakref.ref(loss.grad_fn.next_functions[0][0])
            assert all(choice() is not None for choice in kept)
            loss.backward()
            assert all(choice() is None for choice in kept)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        del loss
        assert here() is None


def test_states_that_are_kept_do_not_grow_with_depth():
    def kept(mode, layers):
        sizes: list[int] = []
        stack = make(mode, layers)

        def size(x):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(size, lambda x: x):
            stack(torch.randn(50, WIDTH, requires_grad=True))
        return sum(n for n in sizes if n >= 50 * WIDTH) / (50 * WIDTH)

    assert [kept("exact", layers) for layers in (8, 16, 32)] == [2.0] * 3
    assert [kept("stored", layers) for layers in (8, 16)] == [9.0, 17.0]


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_frozen_parameters_are_those_of_the_forward_pass(mode):
    """Others' for one call, as of an average; and none that have changed meanwhile."""
    x = torch.randn(3, WIDTH, requires_grad=True)
    found = []
    for each in (mode, "plain"):
        stack = make(each)
        drawn = torch.Generator().manual_seed(8)
        given = {
            name: torch.randn(p.shape, generator=drawn) for name, p in stack.named_parameters()
        }
        found.append(torch.autograd.grad(functional_call(stack, given, (x,)).x.sum(), x)[0])
    torch.testing.assert_close(*found)
    stack = make(mode).requires_grad_(False)
    passed = stack(x)
    stack.layers[1].outer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.x.sum().backward()


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_second_backward_pass_has_the_gradients_of_the_first(mode):
    """Where a force changes a buffer of its own, too."""

    def force(self, x):
        self.calls += 1
        return torch.tanh(self.weight * x) * self.calls, None

    stack = MidpointStack([Force(force) for _ in range(4)], mode=mode)
    x = torch.ones(3, WIDTH, requires_grad=True)
    loss, leaves = stack(x).x.square().sum(), [x, *stack.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert same_bits(first, torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("mode", MODES)
def test_context_that_changes_before_the_backward_pass_is_noticed(mode):
    def force(self, x, mask):
        return torch.tanh(self.weight * x) * mask, None

    mask = torch.ones(WIDTH)
    passed = MidpointStack([Force(force) for _ in range(2)], mode=mode)(
        torch.ones(3, WIDTH), mask=mask
    )
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.x.sum().backward()


@pytest.mark.parametrize("keeps", [False, True])
def test_parameters_are_put_in_place_only_where_the_layer_has_others(monkeypatch, keeps):
    """Or where it has buffers that were others."""
    replaced = []

    def told(module, given, *arguments):
        replaced.append([*given])
        return functional_call(module, given, *arguments)

    monkeypatch.setattr(midpoint_stack, "functional_call", told)
    stack, x = make(layers=2, keeps=keeps), torch.randn(3, WIDTH, requires_grad=True)
    stack(x).x.sum().backward()
    assert len(replaced) == (2 if keeps else 0)
    given = {name: p.detach().clone() for name, p in stack.named_parameters()}
    replaced.clear()
    functional_call(stack, given, (x,)).x.sum().backward()
    assert len(replaced) == 2


def test_a_parameter_that_a_layer_has_twice_has_one_gradient():
    def force(self, x):
        return torch.tanh(self.weight * x) * self.again, None

    found = []
    for mode in MODES:
        layers = [Force(force) for _ in range(2)]
        for layer in layers:
            layer.again = layer.weight
        x = torch.linspace(-1.0, 1.0, WIDTH, requires_grad=True)
        stack = MidpointStack(layers, mode=mode)
        parameters = [*stack.parameters()]
        assert len(parameters) == 2
        found.append(torch.autograd.grad(stack(x).x.square().sum(), parameters))
    assert same_bits(found[0], found[1])
    for value, truth in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(value, truth)
