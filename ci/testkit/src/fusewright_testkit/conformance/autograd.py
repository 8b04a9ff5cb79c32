"""What autograd and its users may do with an operation: hooks, changes in place, subclasses."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ..yardstick import as_tuple
from .package import package  # noqa: F401
from .records import everything, is_float, same_bits

F32 = torch.float32


@pytest.mark.sampled
def test_reference_gradients_are_the_derivatives(form):
    leaves = form.leaves(form.tiny, torch.float64, "cpu")
    assert torch.autograd.gradcheck(form.reference, leaves)
    assert torch.autograd.gradgradcheck(form.reference, leaves)


def test_any_choice_of_inputs_may_require_gradients(op, device):
    """All choices among few inputs; each alone, and all but each, among many."""
    leaves = op.leaves(op.small, op.low, device)
    outputs = len(as_tuple(op.kernels(*leaves)))
    expected = everything(op.kernels, leaves)
    places = [place for place, x in enumerate(leaves) if is_float(x)]
    sizes = range(1, len(places)) if len(places) < 4 else (1, len(places) - 1)
    for chosen in itertools.chain(*(itertools.combinations(places, size) for size in sizes)):
        some = [x if x is None else x.detach() for x in leaves]
        for place in chosen:
            some[place].requires_grad_()
        truth = [expected[outputs + places.index(place)] for place in chosen]
        assert same_bits(everything(op.kernels, some)[outputs:], truth), chosen


def test_output_may_be_changed_in_place_or_torch_says_that_it_is_needed(op, device):
    def doubled(*tensors):
        first, *others = as_tuple(op.kernels(*tensors))
        return first.mul_(2), *others

    def twice(*tensors):
        first, *others = as_tuple(op.kernels(*tensors))
        return 2 * first, *others

    leaves = op.leaves(op.small, F32, device)
    if op.saves_outputs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            everything(doubled, leaves)
    else:
        assert same_bits(everything(doubled, leaves), everything(twice, leaves))


def test_input_changed_after_the_forward_pass_is_noticed(op, device):
    leaves = op.leaves(op.small, F32, device)
    outputs = as_tuple(op.kernels(*leaves))
    with torch.no_grad():
        leaves[op.saves].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(y.sum() for y in outputs if y.requires_grad).backward()


def test_hooks_see_and_replace_what_is_saved(op, device):
    """No tensor is saved twice, and beside the operands no more than is stated."""
    leaves = op.leaves(op.small, F32, device)
    expected = everything(op.kernels, leaves)
    packed = []

    def pack(x):
        packed.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        outputs = as_tuple(op.kernels(*leaves))
    assert same_bits(everything(lambda *_: outputs, leaves), expected)
    kept = op.kept(leaves)
    if kept is not None:
        places = {x.data_ptr() for x in leaves if x is not None}
        saved = [x.data_ptr() for x in packed if x.numel()]
        assert len(saved) == len(set(saved))
        assert sum(x.numel() for x in packed if x.data_ptr() not in places) == kept


@pytest.mark.sampled
@pytest.mark.parametrize("use", ["forward", "backward", "twice"])
def test_nothing_holds_on_to_tensors(op, use, device):
    op.kernels(*op.sample(op.small, F32, device))
    gc.collect()
    gc.disable()
    try:
        leaves = op.leaves(op.small, F32, device)
        outputs = [y for y in as_tuple(op.kernels(*leaves)) if y.requires_grad]
        asked = [x for x in leaves if is_float(x)]
        watched = [weakref.ref(t) for t in (*asked, *outputs)]
        if use != "forward":
            loss = sum(y.cos().sum() for y in outputs)
            watched += [
                weakref.ref(g)
                for g in torch.autograd.grad(loss, asked, create_graph=use == "twice")
            ]
            del loss
        del leaves, outputs, asked
        assert not any(reference() is not None for reference in watched)
    finally:
        gc.enable()


class Tagged(torch.Tensor):
    """A subclass without a __torch_function__ of its own."""


def test_subclass_of_tensor_keeps_its_type_and_its_gradient(op, device):
    x, *others = op.sample(op.small, F32, device)
    tagged = x.clone().as_subclass(Tagged).requires_grad_()
    found = everything(op.kernels, [tagged, *others])
    assert type(op.first(op.kernels(tagged, *others))) is Tagged
    expected = everything(op.kernels, [x.requires_grad_(), *others])
    assert same_bits([y.as_subclass(torch.Tensor) for y in found], expected)


def test_traced_graph_calls_the_op_and_its_backward(op, package, device):  # noqa: F811
    def step(*leaves):
        return everything(op.kernels, leaves)

    leaves = op.leaves(op.small, F32, device)
    traced = make_fx(step)(*leaves)
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    ours = {name for name in called if name.startswith(package.namespace)}
    assert any(name.endswith("_backward.default") for name in ours)
    assert not all(name.endswith("_backward.default") for name in ours)
    assert same_bits(traced(*leaves), step(*leaves))


def test_pending_negation_is_carried_out(op, device):
    """torch marks some views as negated instead of negating them; raw memory does not know."""
    x, *others = op.sample(op.small, F32, device)
    negated = torch._neg_view(-x)
    assert negated.is_neg()
    found = as_tuple(op.kernels(negated, *others))
    assert same_bits(found, as_tuple(op.kernels(x, *others)))


@pytest.mark.sampled
def test_compiled_autograd_runs_the_backward_op(op, device):
    torch._dynamo.reset()
    leaves = op.leaves(op.small, F32, device)
    truth = everything(op.kernels, leaves)
    outputs = as_tuple(op.kernels(*leaves))
    compiler = functools.partial(torch.compile, backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = everything(lambda *_: outputs, leaves)
    assert same_bits(found, truth)
