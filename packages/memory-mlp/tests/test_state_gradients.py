"""Gradients by the tensors of a state, which lie in one: those of tensors that do not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusewright.memory_mlp import (
    MemoryState,
    MemoryWeights,
    NeuralMemory,
    memory_read,
    memory_scan,
)
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_structure

F32 = torch.float32
Use = Callable[[NeuralMemory, MemoryState, Tensor], Tensor]


def square(*tensors: Tensor) -> Tensor:
    return sum((x.square().sum() for x in tensors), torch.zeros(()).to(tensors[0]))


def carried_on(memory, state, x):
    return square(memory(x, state)[0])


def carried_on_twice(memory, state, x):
    return square(memory(x, state)[0], memory(-x, state)[0])


def carried_on_to_the_end(memory, state, x):
    end = memory(x, state)[1]
    return square(*end.weights, *end.momentum)


def read(memory, state, x):
    return square(memory.retrieve(x, state))


def read_as_weights(memory, state, x):
    q = x.unflatten(-1, (1, -1)).expand(-1, -1, memory.heads, -1)[..., : memory.head_dim]
    return square(memory_read(q, state.weights, backend=memory.rules.backend))


def read_and_carried_on(memory, state, x):
    return read(memory, state, x) + carried_on(memory, state, x)


def regularised(memory, state, x):
    return carried_on(memory, state, x) + 3.0 * square(*state.weights)


def regularised_momentum(memory, state, x):
    return carried_on(memory, state, x) + square(state.momentum.w2, state.momentum.b1)


def regularised_alone(memory, state, x):
    return square(state.weights.b2, state.momentum.w1)


def packed(memory, state, x):
    return carried_on(memory, state, x) + square(state.packed)


def reset(memory, state, x):
    rows = torch.tensor([False], device=x.device)
    return carried_on(memory, memory.reset(state, rows), x)


def called_functionally(memory, state, x):
    parameters = dict(memory.named_parameters())
    y, later, _ = torch.func.functional_call(memory, parameters, (x, state))
    return square(y) + square(later.weights.w1)


def mapped(memory, state, x):
    return carried_on(memory, tree_map(lambda x: x * 1, state), x)


USES = [
    *(carried_on, carried_on_twice, carried_on_to_the_end, read, read_as_weights),
    *(read_and_carried_on, regularised, regularised_momentum, regularised_alone, packed),
    *(reset, called_functionally, mapped),
]

# The interpreter takes seconds for a use of the kernels.
FEW = carried_on, read_and_carried_on, regularised, called_functionally
CASES = [
    pytest.param(
        *(use, kind, backend),
        marks=[pytest.mark.slow]
        * (backend == "triton" and not (use in FEW and kind == "of-a-call")),
        id=f"{use.__name__}-{kind}-{backend}",
    )
    for backend in ("reference", "triton")
    for kind in ("of-a-call", "at-the-start")
    for use in USES
]


def tensors_of(state: MemoryState) -> list[Tensor]:
    return [*state.weights, *state.momentum]


def apart(state: MemoryState) -> MemoryState:
    """The same numbers, each tensor a leaf that shares no memory."""
    weights, momentum = (
        MemoryWeights(*(x.detach().clone().requires_grad_() for x in half))
        for half in (state.weights, state.momentum)
    )
    return state._replace(weights=weights, momentum=momentum)


def a_memory(memory_of: Callable[..., NeuralMemory], backend: str, **options: Any) -> NeuralMemory:
    sizes = {"heads": 1, "head_dim": 2, "hidden": 3, "chunk": 2, "convolution": 0}
    # The state at the start is all that the initial weights make: not a rest too.
    return memory_of(backend=backend, dtype=F32, forget="zero", **sizes | options)


def a_state(memory: NeuralMemory, x: Tensor, kind: str) -> MemoryState:
    state = memory.init_state(len(x))
    if kind == "of-a-call":
        state = memory(x, state)[1]
    # Weights and momentum alone are asked about.
    return state._replace(
        tail=state.tail.map(Tensor.detach), convolution=state.convolution.detach()
    )


def draw(memory: NeuralMemory, tokens: int) -> Tensor:
    weight = memory.output.weight
    return torch.randn(1, tokens, memory.dim, dtype=weight.dtype, device=weight.device)


@pytest.mark.parametrize(("use", "kind", "backend"), CASES)
def test_gradients_by_a_state_are_those_of_separate_tensors(use, kind, memory_of, backend):
    """Sums of two terms at most, so that no order of them rounds otherwise."""
    memory = a_memory(memory_of, backend)
    x, later = draw(memory, 2).requires_grad_(), draw(memory, 2)
    state = a_state(memory, x, kind)
    separate = apart(state)
    loss, truth = use(memory, state, later), use(memory, separate, later)
    assert torch.equal(loss, truth)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    found = torch.autograd.grad(loss, tensors_of(state), **options)
    wanted = torch.autograd.grad(truth, tensors_of(separate), **options)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    # And on, to what the state was made of.
    source = x if kind == "of-a-call" else memory.initial["w1"]
    (on,) = torch.autograd.grad(loss, source, **options)
    (chained,) = torch.autograd.grad(tensors_of(state), source, wanted, **options)
    assert torch.equal(on, chained)


@pytest.mark.parametrize("half", ["weights", "momentum"])
def test_hooks_and_retained_gradients_of_a_state_see_every_use(half, memory_of, backend):
    memory = a_memory(memory_of, backend)
    x, later = draw(memory, 2).requires_grad_(), draw(memory, 2)
    state = a_state(memory, x, "of-a-call")
    seen = []
    y = memory(later, state)[0]
    # Set after the use: the graph is what counts, not when it was asked.
    part = getattr(state, half).w2
    part.retain_grad()
    part.register_hook(lambda grad: seen.append(grad.clone()))
    separate = apart(state)
    square(y).backward()
    square(memory(later, separate)[0]).backward()
    wanted = getattr(separate, half).w2.grad
    assert torch.equal(part.grad, wanted)
    assert torch.equal(seen[0], wanted)


def test_hook_that_stops_a_gradient_stops_it(memory_of, backend):
    memory = a_memory(memory_of, backend)
    x, later = draw(memory, 2).requires_grad_(), draw(memory, 2)
    state = a_state(memory, x, "of-a-call")
    for part in tensors_of(state):
        part.register_hook(torch.zeros_like)
    (grad,) = torch.autograd.grad(square(memory(later, state)[0]), x)
    assert not grad.any()


def test_second_derivative_goes_through_a_state(memory_of):
    memory = memory_of(backend="reference")
    x, later = draw(memory, 6), draw(memory, 3)

    def loss(scale):
        _, state, _ = memory(x * scale)
        return memory(later, state)[0].square().sum()

    scale = torch.ones((), dtype=x.dtype, device=x.device, requires_grad=True)
    assert torch.autograd.gradgradcheck(loss, scale)


def test_gradients_of_scans_in_a_row_are_those_of_separate_tensors(scan_op, backend, device):
    q, k, v, *state, alpha, eta, theta = scan_op.draw(1, 3, 1, 2, 3, F32, device)
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    halves[0].w1.requires_grad_()
    options = {"chunk": 2, "backend": backend}
    _, *halves, _, _ = memory_scan(q, k, v, *halves, alpha, eta, theta, **options)
    leaves = [half.map(lambda x: x.detach().clone().requires_grad_()) for half in halves]
    found, wanted = (
        torch.autograd.grad(
            square(memory_scan(q, k, v, *given, alpha, eta, theta, **options).y),
            [x for half in given for x in half],
        )
        for given in (halves, leaves)
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def shares_one_tensor(state: MemoryState) -> bool:
    memory = {x.untyped_storage().data_ptr() for x in tensors_of(state)}
    return memory == {state.packed.untyped_storage().data_ptr()}


@pytest.mark.parametrize("grad", [False, True])
def test_state_lies_in_one_tensor(grad, memory_of, backend):
    memory = a_memory(memory_of, backend)
    with torch.set_grad_enabled(grad):
        for state in (memory.init_state(1), memory(draw(memory, 2))[1]):
            assert shares_one_tensor(state)
            assert shares_one_tensor(memory.detach_state(state))
            assert state.packed.requires_grad == grad
    assert memory_of(layers=3).init_state(1).packed is None
    separate = apart(state)
    assert torch.equal(separate.packed, state.packed)
    assert not shares_one_tensor(separate)


def test_state_that_was_saved_or_copied_goes_on(memory_of):
    memory = a_memory(memory_of, "reference")
    later = draw(memory, 2)
    with torch.no_grad():
        state = memory(draw(memory, 3))[1]
        truth = memory(later, state)[0]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        others = [
            torch.load(file, weights_only=False),
            pickle.loads(pickle.dumps(state)),
            copy.deepcopy(state),
            copy.copy(state),
            MemoryState(*state),
            MemoryState(**state._asdict()),
            tree_map(torch.clone, state),
        ]
        for other in others:
            assert isinstance(other, MemoryState)
            assert len(tree_flatten(other)[0]) == len(tree_flatten(state)[0])
            assert torch.equal(memory(later, other)[0], truth)
    # What a file holds names public types alone.
    assert type(others[0].weights) is type(others[1].momentum) is MemoryWeights


def test_weights_that_become_leaves_get_their_gradients(memory_of, backend):
    memory = a_memory(memory_of, backend)
    later = draw(memory, 2)
    with torch.no_grad():
        state = memory(draw(memory, 2))[1]
    state.weights.w1.requires_grad_()
    separate = apart(state)
    found, wanted = (
        torch.autograd.grad(square(memory(later, s)[0]), s.weights.w1)[0] for s in (state, separate)
    )
    assert torch.equal(found, wanted)


def test_weights_changed_in_place_are_read_as_they_are(memory_of, backend):
    memory = a_memory(memory_of, backend)
    later = draw(memory, 2)
    with torch.no_grad():
        state = memory(draw(memory, 2))[1]
        state.weights.b2.add_(1.0)
        separate = apart(state)
        assert torch.equal(memory(later, state)[0], memory(later, separate)[0])


def test_states_have_one_structure_whatever_made_them(memory_of):
    memory = a_memory(memory_of, "reference")
    x = draw(memory, 2)
    state = memory(x)[1]
    rows = torch.tensor([True], device=x.device)
    structure = tree_structure(state)
    for other in (memory.init_state(1), memory.detach_state(state), memory.reset(state, rows)):
        assert tree_structure(other) == structure
    assert tree_structure(tree_map(torch.clone, state)) == structure
