"""Weights and momentum in one tensor: found again where they are its views, joined where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, NeuralMemory, Reads, memory_read
from fusewright.memory_mlp.common.weights import (
    cast,
    handed_on,
    pack,
    packed_size,
    unpack,
    views,
    views_at_once,
)
from torch.autograd import forward_ad

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


def made_again(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return MemoryWeights(*weights), momentum


def plain(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return views(a_state(), HIDDEN, WIDTH)


def other_rows(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    return weights.map(lambda x: x[1:]), momentum.map(lambda x: x[1:])


def flipped(weights: MemoryWeights, momentum: MemoryWeights) -> Halves:
    # As many numbers of the same tensor, in another order.
    return weights._replace(b2=momentum.b2), momentum


def test_views_of_one_tensor_are_packed_without_a_copy():
    state = a_state()
    for weights, momentum in (unpack(state, HIDDEN, WIDTH), unpack(state.detach(), HIDDEN, WIDTH)):
        whole = pack(weights, momentum)
        assert whole.data_ptr() == state.data_ptr()
        assert whole.shape == state.shape
        assert whole.requires_grad == weights.w1.requires_grad
        assert pack(weights, momentum) is whole


def test_gradient_of_a_packed_state_is_not_copied():
    state, u = a_state(), torch.randn(2, 4, 2, packed_size(HIDDEN, WIDTH))
    (grad,) = torch.autograd.grad(pack(*unpack(state, HIDDEN, WIDTH)), state, u)
    assert grad.data_ptr() == u.data_ptr()
    assert torch.equal(grad, u)


@pytest.mark.parametrize("change", ["scaled", "exchanged", "dropped", "twice"])
def test_gradient_that_was_changed_on_its_way_is_what_it_was_changed_to(change):
    """A hook sees views of the packed gradient; what it returns may be others of them."""
    state, u = a_state(), torch.randn(2, 4, 2, packed_size(HIDDEN, WIDTH))
    weights, momentum = unpack(state, HIDDEN, WIDTH)
    wanted, other = unpack(u.clone(), HIDDEN, WIDTH)
    if change == "scaled":
        weights.b2.register_hook(lambda grad: 2.0 * grad)
        wanted = wanted._replace(b2=2.0 * wanted.b2)
    elif change == "exchanged":
        part = views(u, HIDDEN, WIDTH)[1].b2
        weights.b2.register_hook(lambda grad: part)
        wanted = wanted._replace(b2=other.b2)
    elif change == "dropped":
        momentum.w1.register_hook(torch.zeros_like)
        other = other._replace(w1=torch.zeros_like(other.w1))
    outputs, cotangents = [pack(weights, momentum)], [u]
    if change == "twice":
        outputs += [weights.w2]
        cotangents += [u.new_ones(weights.w2.shape)]
        wanted = wanted._replace(w2=wanted.w2 + 1.0)
    (grad,) = torch.autograd.grad(outputs, state, cotangents)
    for found, truth in zip(views(grad, HIDDEN, WIDTH), (wanted, other), strict=True):
        assert same(found, truth)


@pytest.mark.parametrize(
    "change",
    [of_another, scaled, exchanged, half_detached, other_rows, flipped, made_again, plain],
)
def test_anything_else_is_joined(change: Callable[..., Halves]):
    state = a_state()
    weights, momentum = change(*unpack(state, HIDDEN, WIDTH))
    whole = pack(weights, momentum)
    assert whole.data_ptr() != state.data_ptr()
    assert handed_on(weights, momentum) is None
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


class Stopped(torch.autograd.Function):
    """A view that no gradient passes, as autograd cannot tell from the tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return 0.0 * dx


@pytest.mark.parametrize("leaf", [False, True])
def test_function_between_the_views_and_their_tensor_is_not_passed_by(leaf):
    state = a_state().detach().requires_grad_()
    whole = state if leaf else state * 1.0
    weights, momentum = unpack(whole, HIDDEN, WIDTH)
    assert pack(weights, momentum).data_ptr() == whole.data_ptr()
    assert handed_on(weights._replace(b2=Stopped.apply(weights.b2)), momentum) is None
    stopped = pack(weights.map(Stopped.apply), momentum.map(Stopped.apply))
    (grad,) = torch.autograd.grad(stopped.square().sum(), state)
    assert not grad.any()


def test_gradient_stopped_between_two_calls_of_a_layer_is_stopped():
    memory = NeuralMemory(6, heads=2, chunk=2, hidden=4)
    x = torch.randn(2, 4, 6, requires_grad=True)
    _, state, _ = memory(x)
    stopped = state._replace(
        weights=state.weights.map(Stopped.apply),
        momentum=state.momentum.map(Stopped.apply),
        convolution=state.convolution.detach(),
    )
    y, *_ = memory(torch.randn(2, 4, 6), stopped)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not grad.any()


def test_tangent_of_a_view_is_not_dropped():
    weights, momentum = unpack(a_state(), HIDDEN, WIDTH)
    with forward_ad.dual_level():
        dual = weights._replace(b2=forward_ad.make_dual(weights.b2, torch.ones_like(weights.b2)))
        assert forward_ad.unpack_dual(pack(dual, momentum)).tangent is not None


def test_masked_and_unmasked_reads_join():
    memory = NeuralMemory(6, heads=2, chunk=2, hidden=4)
    x = torch.randn(2, 6, 6)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    first, state, _ = memory.advance(x[:, :3], mask=mask)
    second, _, _ = memory.advance(x[:, 3:], state)
    apart = torch.cat([memory.outputs(first), memory.outputs(second)], 1)
    torch.testing.assert_close(memory.outputs(Reads.joined([first, second])), apart)
    assert (apart[0, 1] == 0).all()


def test_reads_that_do_not_fit_are_refused():
    memory = NeuralMemory(6, heads=2, chunk=2, hidden=4)
    reads, *_ = memory.advance(torch.randn(2, 4, 6), mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one Reads"):
        Reads.joined([])
    for wrong in (
        reads._replace(kept=reads.kept[:1]),
        reads._replace(kept=reads.kept[:, :3]),
        reads._replace(mask=reads.mask[:1]),
    ):
        with pytest.raises(ValueError, match=r"reads\.(kept|mask) must have shape"):
            memory.outputs(wrong)
    with pytest.raises(TypeError, match="kept must be a bool tensor"):
        memory.outputs(reads._replace(kept=reads.kept.float()))


@pytest.mark.parametrize("granularity", ["chunk", "segment"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_pooled_memory_of_no_rows(granularity, tokens):
    options = {"granularity": granularity, "scope": "batch_pooled", "chunk": 2}
    memory = NeuralMemory(6, heads=2, hidden=4, **options)
    y, state, _ = memory(torch.randn(0, tokens, 6))
    assert y.shape == (0, tokens, 6)
    assert memory.retrieve(torch.randn(0, tokens, 6), state).shape == (0, tokens, 6)


@pytest.mark.parametrize("lead", [(2, 3), (1, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("sliced", [False, True])
def test_views_by_one_operation_are_those_by_three(lead, sliced):
    state = torch.randn(*lead, 3, packed_size(HIDDEN, WIDTH))[:, :, 1:]
    state = state if sliced else state.contiguous()
    found, expected = (sum(of(state, HIDDEN, WIDTH), ()) for of in (views_at_once, views))
    assert all(map(torch.equal, found, expected))
    assert [x.storage_offset() for x in found] == [x.storage_offset() for x in expected]
