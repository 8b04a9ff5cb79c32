"""What autograd, transforms and compilers may do with memory_update, and its registration."""

from __future__ import annotations

import itertools

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_update
from fusewright.memory_mlp.update.memory_update import reference_gradients
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from torch.utils.checkpoint import checkpoint

from .compared import assert_same_but_for_rounding

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SIZES = (), 5, 4, 6
OPS = torch.ops.fusewright_memory_mlp
OPTIONS = "silu", "sum", 1.0


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


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


@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
def test_reference_passes_gradcheck(update_op, clip):
    op = update_op.having(row_weights=True, max_grad_norm=clip)
    leaves = [x.requires_grad_() for x in op.draw((), 3, 2, 3, F64)]
    assert torch.autograd.gradcheck(op.reference, leaves)


def test_registered_op_passes_opcheck(update_op, device):
    leaves = [x.requires_grad_() for x in update_op.draw(*SIZES, F32, device)]
    torch.library.opcheck(OPS.memory_update.default, (*leaves, None, *OPTIONS))


def test_registered_backward_op_passes_opcheck(update_op, device):
    tensors = update_op.draw(*SIZES, F32, device)
    found = OPS.memory_update(*tensors, None, *OPTIONS)
    upstream = [torch.randn_like(y) for y in found[:8]]
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(
        OPS.memory_update_backward.default,
        (*leaves, None, found[9], *found[11:], *upstream, None, *OPTIONS, True, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad],
    ids=lambda transform: transform.__name__,
)
def test_transform_is_right(update_op, transform, device):
    hold(update_op, update_op.draw((), 3, 2, 3, F32, device), transform)


def test_second_derivative_is_right(update_op, device):
    op = update_op.having(row_weights=True, max_grad_norm=0.5)
    tensors = op.draw((), 3, 2, 3, F32, device)
    steepness = transforms.slopes_to_differentiate
    yardstick = Yardstick(steepness(op.reference), tensors, [torch.randn_like(x) for x in tensors])
    yardstick.check(steepness(op.kernels))


def test_func_grad_compiled_to_one_graph_is_right(update_op, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    tensors = update_op.draw((), 3, 2, 3, F32, device)
    hold(update_op, tensors, transforms.func_grad, compiler)


def test_full_graph_compilation_gives_eager_bits(update_op, device):
    op = update_op.having(row_weights=True, max_grad_norm=1.0)
    leaves = [x.requires_grad_() for x in op.draw(*SIZES, BF16, device)]
    expected = op.kernels(*leaves)
    found = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize("transform", transforms.FORWARD_MODES)
def test_forward_mode_raises(update_op, transform, device):
    k, *others = update_op.draw(*SIZES, F32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda k: update_op.kernels(k, *others)[0], k)


def test_same_inputs_same_bits_whether_gradients_are_recorded_or_checkpointed(update_op, device):
    op = update_op.having(row_weights=True, max_grad_norm=1.0)
    leaves = [x.requires_grad_() for x in op.draw(*SIZES, BF16, device)]
    with torch.no_grad():
        quiet = op.kernels(*leaves)
    first = op.kernels(*leaves)
    again = checkpoint(op.kernels, *leaves, use_reentrant=False)
    assert same_bits(quiet, first)
    assert same_bits(again, first)
    assert same_bits(slopes(again, leaves), slopes(first, leaves))


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


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["alike", "mixed"])
def test_autocast_casts_rows_as_for_a_matrix_product_and_leaves_the_state(
    update_op, dtype, backend, device
):
    k, v, *others = update_op.draw(*SIZES, F32, device)
    leaves = [x.requires_grad_() for x in (k, v.to(dtype), *others)]
    with torch.autocast(device, BF16):
        outputs = update_op.public(*leaves, backend=backend)
    assert {y.dtype for y in outputs} == {F32}
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


def test_input_changed_after_the_forward_pass_is_noticed(update_op, device):
    leaves = [x.requires_grad_() for x in update_op.draw(*SIZES, F32, device)]
    outputs = update_op.kernels(*leaves)
    with torch.no_grad():
        leaves[2].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_two_steps_differentiate_as_one_chain(update_op, device):
    """The memory that one step writes is the one that the next step reads."""

    def chain(call):
        def steps(k, v, *others):
            first = call(k, v, *others)
            return call(v, k, *first[:8], *others[8:])

        return steps

    tensors = update_op.draw(*SIZES, F32, device)
    Yardstick(chain(update_op.reference), tensors).check(chain(update_op.kernels))


def test_meta_tensors_get_shapes(update_op):
    tensors = [x.to("meta") for x in update_op.draw((2, 3), 5, 4, 6)]
    update = memory_update(
        *tensors[:2], MemoryWeights(*tensors[2:6]), MemoryWeights(*tensors[6:10]), *tensors[10:]
    )
    assert update.weights.w1.shape == (2, 3, 6, 4)
    assert update.loss.shape == update.skipped.shape == (2, 3)
    assert update.loss.is_meta
