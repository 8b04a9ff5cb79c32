"""What autograd does with memory_update, beyond what the suite asks of every operation."""

from __future__ import annotations

import itertools

import pytest
import torch
from fusewright.memory_mlp.update.memory_update import reference_gradients
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.conformance import same_bits

from .compared import assert_same_but_for_rounding

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SIZES = (), 5, 4, 6


def slopes(outputs, leaves):
    return torch.autograd.grad(transforms.loss(lambda *y: y)(*outputs), leaves)


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_reference_backward_is_the_derivative_of_the_unfused_form(update_op, activation):
    """Clipped and unclipped, with and without row weights, in every reduction."""
    choices = itertools.product(("sum", "mean_feature", "mean_all"), (None, 0.05, 1e3), (0, 1))
    for reduction, clip, weighted in choices:
        options = dict(activation=activation, reduction=reduction, max_grad_norm=clip)
        op = update_op.having(bool(weighted), **options)
        leaves = [x.requires_grad_() for x in op.draw((2, 3), 7, 4, 6, F64)]
        outputs = op.reference(*leaves)
        upstream = [torch.randn_like(y) for y in outputs]
        truth = torch.autograd.grad(outputs, leaves, upstream)
        inputs = leaves if weighted else (*leaves, None)
        found = reference_gradients(upstream, inputs, (*options.values(), True, True))
        found = found[: 13 + weighted]
        assert_same_but_for_rounding(found, truth)


@pytest.mark.parametrize("used", [slice(0, 1), slice(5, 9)], ids=["w1", "momentum-and-loss"])
def test_needs_no_gradient_of_what_does_not_ask(update_op, used, device):
    """Rows, memory or momentum alone; and a part of what a step leaves."""
    tensors = update_op.draw((), 3, 2, 3, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = update_op.kernels(*leaves)[used]
    truth = torch.autograd.grad(sum(y.sum() for y in outputs), leaves, materialize_grads=True)
    for asked in (0, 4, 7):
        mixed = [leaves[i] if i == asked else x for i, x in enumerate(tensors)]
        outputs = update_op.kernels(*mixed)[used]
        (found,) = torch.autograd.grad(sum(y.sum() for y in outputs), leaves[asked])
        assert torch.equal(found, truth[asked])


def test_norm_and_skipped_have_no_gradients(update_op, backend, device):
    leaves = [x.requires_grad_() for x in update_op.draw(*SIZES, F32, device)]
    update = update_op.whole(*leaves, backend=backend)
    assert update.loss.requires_grad
    assert not update.grad_norm.requires_grad
    assert not update.skipped.requires_grad


def test_autocast_casts_rows_of_two_dtypes(update_op, backend, device):
    k, v, *others = update_op.draw(*SIZES, F32, device)
    leaves = [x.requires_grad_() for x in (k, v.to(BF16), *others)]
    with torch.autocast(device, BF16):
        outputs = update_op.public(*leaves, backend=backend)
    grads = slopes(outputs, leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]
    expected = update_op.public(k.to(BF16), v.to(BF16), *others, backend=backend)
    assert same_bits(outputs, expected)


def test_gates_of_another_dtype_get_gradients_in_it(update_op, backend, device):
    *tensors, alpha, eta, theta = update_op.draw(*SIZES, F32, device)
    gates = [x.to(BF16).requires_grad_() for x in (alpha, eta, theta)]
    outputs = update_op.public(*tensors, *gates, backend=backend)
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), gates)
    assert [g.dtype for g in grads] == [BF16] * 3


def test_two_steps_differentiate_as_one_chain(update_op, device):
    """The memory that one step writes is the one that the next step reads."""

    def chain(call):
        def steps(k, v, *others):
            first = call(k, v, *others)
            return call(v, k, *first[:8], *others[8:])

        return steps

    tensors = update_op.draw(*SIZES, F32, device)
    Yardstick(chain(update_op.reference), tensors).check(chain(update_op.kernels))
