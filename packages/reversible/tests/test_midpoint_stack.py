"""The reversible stack: states come back to the bit, gradients are those of plain autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from fusewright.reversible import MidpointStack
from fusewright.reversible.midpoint.midpoint_stack import MODES
from fusewright.reversible.midpoint.reference import midpoint_rule
from fusewright_testkit import Yardstick
from torch.func import functional_call

from .stacks import WIDTH, Force, Layer, make, results, same_bits


@pytest.mark.parametrize("layers", [1, 2, 3, 32])
def test_states_come_back_to_the_bit(layers):
    """Gradients from states recomputed are those from states that were stored."""
    x = torch.randn(4, 7, WIDTH)
    exact, stored = (results(make(mode, layers), x) for mode in ("exact", "stored"))
    assert same_bits(exact, stored)


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_gradients_are_those_of_plain_autograd(mode):
    stacks = {name: make(name, 8) for name in (mode, "plain")}
    names = [name for name, _ in stacks[mode].named_parameters()]

    def through(name):
        def op(x, *parameters):
            given = dict(zip(names, parameters, strict=True))
            passed = functional_call(stacks[name], {**given, **tables(stacks[name], x.dtype)}, (x,))
            return passed.x, passed.aux

        return op

    inputs = [torch.randn(3, 5, WIDTH), *(p.detach() for p in stacks[mode].parameters())]
    Yardstick(through("plain"), inputs).check(through(mode))


def tables(stack, dtype):
    return {name: x.to(dtype) for name, x in stack.named_buffers()}


def test_all_modes_have_the_same_states():
    x = torch.randn(2, 3, WIDTH)
    found = [results(make(mode, 6), x)[:2] for mode in MODES]
    with torch.no_grad():
        passed = make("exact", 6)(x)
    for state, aux in found:
        assert torch.equal(state, passed.x)
        assert torch.equal(aux, passed.aux)


def test_recurrence_is_the_midpoint_rule():
    stack = make("plain", 4)
    x = torch.randn(2, WIDTH)
    h, forces = stack.step, [lambda p, f=f: f.force(p, tape=None)[0] for f in stack.layers]
    before, after = x, x + h / 2 * forces[0](x)
    for force in forces[1:]:
        before, after = after, before + 2 * h * force(after)
    assert torch.equal(midpoint_rule(x, forces, h), after)
    # Half a unit of rounding a layer, and what the layers after make of it.
    bound = len(stack.layers) * 2 / stack.states.one
    assert (stack(x).x - after).abs().max() <= bound


@pytest.mark.parametrize("what", ["chooses", "keeps", "drop"])
@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_layer_is_recomputed_as_it_was(mode, what):
    """Its choices, its random numbers, and the state that it keeps, which is not kept twice."""
    options = {what: 0.4 if what == "drop" else True}
    x = torch.randn(3, 4, WIDTH)
    stack, plain = make(mode, **options), make("plain", **options)
    found, expected = results(stack, x), results(plain, x)
    for value, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(value, truth)
    assert all(layer.calls == [False, True] for layer in stack.layers)
    assert same_bits(list(stack.buffers()), list(plain.buffers()))


@pytest.mark.parametrize("mode", ["exact", "stored"])
def test_autocast_of_the_forward_pass_is_that_of_the_backward_pass(mode):
    found = []
    for each in (mode, "plain"):
        stack = make(each)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = stack(x).x.square().sum()
        found.append(torch.autograd.grad(loss, [x, *stack.parameters()]))
    for value, truth in zip(*found, strict=True):
        assert value.dtype == truth.dtype == torch.float32
        torch.testing.assert_close(value, truth)


def test_layers_that_share_parameters_add_their_gradients():
    found = []
    for mode in MODES:
        torch.manual_seed(5)
        layer = Layer()
        found.append(
            results(MidpointStack([layer, Layer(), layer], mode=mode), torch.ones(2, WIDTH))
        )
    assert same_bits(found[0], found[1])
    for value, truth in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(value, truth)


def test_every_parameter_has_a_gradient_and_frozen_ones_none():
    stack = make()
    stack.layers[1].inner.weight.requires_grad_(False)
    stack(torch.randn(3, WIDTH), scale=2.0).x.sum().backward()
    for name, p in stack.named_parameters():
        assert (p.grad is not None and bool(p.grad.any())) == (name != "layers.1.inner.weight")


def test_compiled_stack_equals_the_eager_one():
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        stack = make(layers=2, chooses=True)
        call = torch.compile(stack, backend="aot_eager") if compiles else stack
        x = torch.ones(2, WIDTH, requires_grad=True)
        torch.manual_seed(4)
        passed = call(x)
        loss = passed.x.square().sum() + passed.aux
        found.append([loss, *torch.autograd.grad(loss, [x, *stack.parameters()])])
    for value, truth in zip(*found, strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("aux", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_aux_may_be_without_a_graph_and_a_force_transposed(aux):
    def force(self, x):
        return torch.tanh(self.weight * x).t().contiguous().t(), aux

    x, found = torch.randn(7, WIDTH), []
    for mode in MODES:
        for backend in ("triton", "reference"):
            stack = MidpointStack([Force(force) for _ in range(3)], mode=mode, backend=backend)
            found.append(results(stack, x))
    assert found[0][1] == 3 * 0.25
    assert all(same_bits(found[0][:2], other[:2]) for other in found)
    assert all(same_bits(found[0], other) for other in found[:4])


def test_one_launch_a_step_passes_a_stack():
    x = torch.randn(3, 5, WIDTH)
    found = []
    for backend in ("triton", "reference"):
        found.append(results(make(layers=4, backend=backend), x))
    assert same_bits(*found)


@pytest.mark.parametrize("mode", MODES)
def test_states_are_those_of_a_start_laid_out_otherwise(mode):
    """Columns of a table, the same row again and again: the launches take states as they lie."""
    for x in (torch.randn(WIDTH, 7).t(), torch.randn(1, WIDTH).expand(7, WIDTH)):
        found = []
        for backend in ("triton", "reference"):
            for start in (x, x.contiguous()):
                found.append(results(make(mode, 3, backend), start))
        assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last", [False, True], ids=["between", "last"])
def test_force_may_be_without_a_graph(mode, last):
    """Of a layer that is skipped: zeros, or x itself, detached."""

    def skipped(self, x):
        return (torch.zeros_like(x) if last else 0.5 * x.detach()), None

    def force(self, x):
        return torch.tanh(self.weight * x), None

    x, found = torch.randn(3, WIDTH), []
    skip = {0, 1, 4} if last else {0, 2}
    for each in (mode, "plain"):
        layers = [Force(skipped if number in skip else force) for number in range(5)]
        stack = MidpointStack(layers, mode=each)
        start = x.clone().requires_grad_()
        stack(start).x.square().sum().backward()
        found.append([start.grad, *(p.grad for p in stack.parameters())])
    for value, truth in zip(*found, strict=True):
        assert (value is None) == (truth is None)
        if truth is not None:
            torch.testing.assert_close(value, truth)
    # The last state is a sum of every other force: skipping the last layer skips the one before.
    assert sum(value is None for value in found[0]) == (4 if last else 2)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_parameters_are_called_once(mode):
    stack, x = make(mode, layers=3), torch.randn(2, WIDTH)
    gradients = []
    for hooked in (False, True):
        weight, called = stack.layers[1].inner.weight, []
        if hooked:
            weight.register_hook(lambda g, called=called: called.append(True) or 3.0 * g)
        stack.zero_grad()
        stack(x).x.square().sum().backward()
        gradients.append(weight.grad)
        assert len(called) == hooked
    assert torch.equal(gradients[1], 3.0 * gradients[0])


@pytest.mark.parametrize("mode", ["exact", "stored"])
@pytest.mark.parametrize("change", ["delete", "replace", "append"])
def test_layers_may_change_after_a_stack_is_made(mode, change):
    stack, x = make(mode, layers=2), torch.randn(2, WIDTH)
    stack.layers.append(Layer(keeps=True))
    if change == "delete":
        del stack.layers[0]
    elif change == "replace":
        stack.layers[0] = Layer(keeps=True)
    made_so = MidpointStack(copy.deepcopy(list(stack.layers)), mode=mode)
    assert same_bits(results(stack, x), results(made_so, x))
