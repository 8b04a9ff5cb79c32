"""Weights and momentum in one tensor: found again where they are its views, joined where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, Reads, memory_read
from fusewright.memory_mlp.packing import cast, pack, packed_size, unpack

HIDDEN, WIDTH = 5, 3
Halves = tuple[MemoryWeights, MemoryWeights]


def a_state() -> torch.Tensor:
    return torch.randn(2, 4, 2, packed_size(HIDDEN, WIDTH), requires_grad=True) * 1.0


def same(found: MemoryWeights, wanted: MemoryWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def of_another(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return weights, unpack(a_state(), HIDDEN, WIDTH)[1]


def scaled(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return weights._replace(b1=2.0 * weights.b1), momentum


def exchanged(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return momentum, weights


def half_detached(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return weights, momentum._replace(w2=momentum.w2.detach())


def other_rows(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return weights.map(lambda x: x[1:]), momentum.map(lambda x: x[1:])


def flipped(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    # As many numbers of the same tensor, in another order.
    return weights._replace(b2=momentum.b2), momentum


def observed(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    weights.b2.retain_grad()
    return weights, momentum


def hooked(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    momentum.w1.register_hook(lambda grad: grad)
    return weights, momentum


def test_views_of_one_tensor_are_that_tensor():
    state = a_state()
    assert pack(*unpack(state, HIDDEN, WIDTH)) is state


@pytest.mark.parametrize(
    "change",
    [of_another, scaled, exchanged, half_detached, other_rows, flipped, observed, hooked],
)
def test_anything_else_is_joined(change: Callable[..., Halves]):
    state = a_state()
    weights, momentum = change(*unpack(state, HIDDEN, WIDTH))
    whole = pack(weights, momentum)
    assert whole is not state
    for found, wanted in zip(unpack(whole, HIDDEN, WIDTH), (weights, momentum), strict=True):
        assert same(found, wanted)


def test_no_gradient_passes_through_views_that_were_made_without():
    state = a_state()
    with torch.no_grad():
        halves = unpack(state, HIDDEN, WIDTH)
    weights, momentum = unpack(state, HIDDEN, WIDTH)
    for parts in (halves, (weights.map(torch.Tensor.detach), momentum.map(torch.Tensor.detach))):
        assert same(unpack(pack(*parts), HIDDEN, WIDTH)[0], weights)
        found = pack(*parts).sum() + cast(parts[0], torch.bfloat16).w1.sum() + 0.0 * state.sum()
        assert not torch.autograd.grad(found, state)[0].any()


def test_views_of_a_constant_may_be_leaves():
    weights, momentum = unpack(a_state().detach() * 1.0, HIDDEN, WIDTH)
    leaves = weights.map(lambda x: x.view_as(x).requires_grad_())
    for grad in torch.autograd.grad(pack(leaves, momentum).sum(), leaves):
        assert torch.equal(grad, torch.ones_like(grad))


def test_a_retained_gradient_is_that_of_everything_that_reads_it():
    """As it would be for weights that are no views."""
    state, q = a_state(), torch.randn(2, 6, 4, WIDTH)
    weights, momentum = unpack(state, HIDDEN, WIDTH)
    weights.map(torch.Tensor.retain_grad)
    (memory_read(q, weights).square().sum() + pack(weights, momentum).square().sum()).backward()
    leaves = weights.map(lambda x: x.detach().requires_grad_())
    sums = sum(x.square().sum() for x in leaves)
    (memory_read(q, leaves).square().sum() + sums).backward()
    for found, wanted in zip(weights, leaves, strict=True):
        assert torch.equal(found.grad, wanted.grad)


def test_casting_is_that_of_every_tensor_and_so_are_its_gradients():
    state = a_state()
    weights, _ = unpack(state, HIDDEN, WIDTH)
    found = cast(weights, torch.bfloat16)
    assert same(found, weights.map(torch.Tensor.bfloat16))
    (grad,) = torch.autograd.grad([x.float().square().sum() for x in found], state)
    dweights, dmomentum = unpack(grad, HIDDEN, WIDTH)
    assert same(dweights, found.map(lambda x: (2.0 * x.float()).bfloat16().float()))
    assert same(dmomentum, dmomentum.map(torch.zeros_like))


@pytest.mark.parametrize("masked", [False, True])
def test_output_of_joined_reads_is_that_of_the_calls(memory_of, device, masked):
    memory = memory_of()
    x = torch.randn(2, 11, memory.dim, device=device, dtype=memory.output.weight.dtype)
    x[1, 6] = torch.nan
    mask = torch.arange(11, device=device).expand(2, 11) != 4 if masked else None
    parts, outputs, state, other = [], [], None, None
    for rows in (slice(0, 5), slice(5, 11)):
        own = None if mask is None else mask[:, rows]
        reads, state, _ = memory.advance(x[:, rows], state, mask=own)
        y, other, _ = memory(x[:, rows], other, mask=own)
        parts.append(reads)
        outputs.append(y)
    found, wanted = memory.outputs(Reads.joined(parts)), torch.cat(outputs, 1)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found[1, 6].isnan().all()
