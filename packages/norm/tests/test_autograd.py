"""What autograd and its users may do with the ops: hooks, changes in place, subclasses, export."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from fusewright import norm
from fusewright.norm.row_norm import reference
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


def test_any_choice_of_inputs_may_require_gradients(op, device):
    tensors = op.draw(SHAPE, F32, device)

    def with_constants(call, wanted):
        def of_chosen(*chosen):
            leaves = iter(chosen)
            operands = (next(leaves) if w else t for t, w in zip(tensors, wanted, strict=True))
            return op.first(call(*operands))

        return of_chosen

    for wanted in itertools.product([False, True], repeat=len(tensors)):
        if any(wanted):
            chosen = list(itertools.compress(tensors, wanted))
            yardstick = Yardstick(with_constants(op.reference, wanted), chosen, dtype=F32)
            yardstick.check(with_constants(op.kernels, wanted))


def test_third_derivative_is_right(op, device):
    def steepness(call):
        def of_leaves(*leaves):
            value = op.first(call(*leaves)).cos().sum()
            for _ in range(2):
                grads = torch.autograd.grad(value, leaves, create_graph=True)
                value = sum(g.square().sum() for g in grads)
            return torch.autograd.grad(value, leaves, create_graph=True)

        return of_leaves

    tensors = op.draw((2, 5), F32, device)
    # The third derivatives are outputs here; no fourth is taken of them.
    yardstick = Yardstick(steepness(op.reference), tensors, [None] * len(tensors))
    yardstick.check(steepness(op.kernels))


def test_one_tensor_may_be_both_operands(device):
    x, weight = torch.randn(SHAPE, device=device), torch.randn(SHAPE[-1], device=device)

    def doubled(call):
        return lambda x, weight: call(x, x, weight, eps=1e-6)

    yardstick = Yardstick(doubled(reference.add_rms_norm), [x, weight])
    yardstick.check(lambda x, w: norm.add_rms_norm(x, x, w, eps=1e-6, backend="triton"))


def test_output_may_be_changed_in_place(op, device):
    leaves = leaves_of(op, device)
    y = op.first(op.kernels(*leaves))
    expected = slopes(2 * y, leaves)
    assert same_bits(slopes(op.first(op.kernels(*leaves)).mul_(2), leaves), expected)


def test_sum_changed_after_the_forward_pass_is_noticed(device):
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    y, total = norm.add_rms_norm(x, x.detach(), backend="triton")
    total.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_see_and_replace_what_is_saved(op, device):
    leaves = leaves_of(op, device)
    expected = slopes(op.first(op.kernels(*leaves)), leaves)
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        y = op.first(op.kernels(*leaves))
    assert sum(n == y.numel() for n in packed) == op.saved
    assert same_bits(slopes(y, leaves), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("use", ["forward", "backward", "twice"])
def test_nothing_holds_on_to_tensors(op, use, device):
    gc.collect()
    gc.disable()
    try:
        leaves = leaves_of(op, device)
        y = op.first(op.kernels(*leaves))
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
    y = op.first(op.kernels(tagged, *others))
    assert type(y) is Tagged
    (found,) = slopes(y, [tagged])
    (expected,) = slopes(op.first(op.kernels(x.requires_grad_(), *others)), [x])
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


def test_traced_graph_calls_the_op_and_its_backward(op, device):
    def step(*leaves):
        return slopes(op.first(op.kernels(*leaves)), leaves)

    leaves = leaves_of(op, device)
    traced = make_fx(step)(*leaves)
    assert f"fusewright_norm.{op.name}.default" in traced.code
    assert "_backward.default" in traced.code
    assert same_bits(traced(*leaves), step(*leaves))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
@pytest.mark.parametrize("module", [norm.RMSNorm, norm.LayerNorm])
def test_exported_module_serves_any_number_of_rows(module, strict, device):
    layer = module(24, backend="triton", device=device)
    rows = torch.export.Dim("rows")
    x = torch.randn(SHAPE, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},), strict=strict)
    more = torch.randn(9, 24, device=device)
    assert torch.equal(program.module()(more), layer(more))


@pytest.mark.parametrize("module", [norm.RMSNorm, norm.LayerNorm])
def test_module_made_on_meta_is_filled_elsewhere(module, device):
    layer = module((4, 6), device="meta").to_empty(device=device)
    layer.reset_parameters()
    x = torch.randn(3, 4, 6, device=device)
    assert torch.equal(layer(x), module((4, 6), device=device)(x))


def test_pending_negation_is_carried_out(op, device):
    """torch marks some views as negated instead of negating them; raw memory does not know."""
    x, *others = op.draw((5, 1), F32, device)
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg()
    assert torch.equal(op.first(op.kernels(negated, *others)), op.first(op.kernels(x, *others)))


def test_compiled_autograd_runs_the_backward_op(op, device):
    leaves = leaves_of(op, device)
    truth = slopes(op.first(op.kernels(*leaves)), leaves)
    y = op.first(op.kernels(*leaves))
    compiler = functools.partial(torch.compile, backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = slopes(y, leaves)
    assert same_bits(found, truth)
