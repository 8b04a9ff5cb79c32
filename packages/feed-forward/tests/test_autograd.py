"""What autograd and its users may do with the ops: hooks, changes in place, subclasses, tracing."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from fusewright_testkit import Yardstick
from torch.fx.experimental.proxy_tensor import make_fx

F32 = torch.float32
SHAPE = (5, 24)


def leaves_of(op, device):
    return [t.requires_grad_() for t in op.draw(SHAPE, F32, device)]


def slopes(y, leaves):
    return torch.autograd.grad(y.cos().sum(), leaves)


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def test_third_derivative_is_right(op, device):
    def steepness(call):
        def of_leaves(*leaves):
            value = call(*leaves).cos().sum()
            for _ in range(2):
                grads = torch.autograd.grad(value, leaves, create_graph=True)
                value = sum(g.square().sum() for g in grads)
            return torch.autograd.grad(value, leaves, create_graph=True)

        return of_leaves

    tensors = op.draw((2, 5), F32, device)
    # The third derivatives are outputs here; no fourth is taken of them.
    yardstick = Yardstick(steepness(op.reference), tensors, [None] * len(tensors))
    yardstick.check(steepness(op.kernels))


def test_output_may_be_changed_in_place(op, device):
    leaves = leaves_of(op, device)
    expected = slopes(2 * op.kernels(*leaves), leaves)
    assert same_bits(slopes(op.kernels(*leaves).mul_(2), leaves), expected)


def test_input_changed_after_the_forward_pass_is_noticed(op, device):
    leaves = leaves_of(op, device)
    y = op.kernels(*leaves)
    with torch.no_grad():
        leaves[-1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inputs_alone_are_saved_and_hooks_replace_them(op, device):
    leaves = leaves_of(op, device)
    expected = slopes(op.kernels(*leaves), leaves)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        y = op.kernels(*leaves)
    assert packed == [leaf.shape for leaf in leaves]
    assert same_bits(slopes(y, leaves), expected)


@pytest.mark.parametrize("use", ["forward", "backward", "twice"])
def test_nothing_holds_on_to_tensors(op, use, device):
    gc.collect()
    gc.disable()
    try:
        leaves = leaves_of(op, device)
        y = op.kernels(*leaves)
        watched = [weakref.ref(t) for t in (*leaves, y)]
        if use != "forward":
            grads = torch.autograd.grad(y.cos().sum(), leaves, create_graph=use == "twice")
            watched += [weakref.ref(g) for g in grads]
            del grads
        del leaves, y
        assert not any(reference() is not None for reference in watched)
    finally:
        gc.enable()


class Tagged(torch.Tensor):
    """A subclass without a __torch_function__ of its own."""


def test_subclass_of_tensor_keeps_its_type_and_its_gradient(op, device):
    x, *others = op.draw(SHAPE, F32, device)
    tagged = x.clone().as_subclass(Tagged).requires_grad_()
    y = op.kernels(tagged, *others)
    assert type(y) is Tagged
    (found,) = slopes(y, [tagged])
    (expected,) = slopes(op.kernels(x.requires_grad_(), *others), [x])
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


def test_traced_graph_calls_the_op_and_its_backward(op, device):
    def step(*leaves):
        return slopes(op.kernels(*leaves), leaves)

    leaves = leaves_of(op, device)
    traced = make_fx(step)(*leaves)
    assert f"fusewright_feed_forward.{op.name}.default" in traced.code
    assert f"fusewright_feed_forward.{op.name}_backward.default" in traced.code
    assert same_bits(traced(*leaves), step(*leaves))


def test_pending_negation_is_carried_out(op, device):
    """torch marks some views as negated instead of negating them; raw memory does not know."""
    x, *others = op.draw(SHAPE, F32, device)
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg()
    assert torch.equal(op.kernels(negated, *others), op.kernels(x, *others))


def test_compiled_autograd_runs_the_backward_op(op, device):
    leaves = leaves_of(op, device)
    truth = slopes(op.kernels(*leaves), leaves)
    y = op.kernels(*leaves)
    compiler = functools.partial(torch.compile, backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = slopes(y, leaves)
    assert same_bits(found, truth)
