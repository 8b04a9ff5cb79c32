"""What autograd, transforms and compilers may do with memory_scan, and its registration."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_scan
from fusewright.memory_mlp.common.weights import pack
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from torch.utils.checkpoint import checkpoint

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Rows, tokens, heads, D, hidden units: one chunk of one head.
SIZES = 1, 2, 1, 2, 3
OPS = torch.ops.fusewright_memory_mlp
OPTIONS = 3, 64, "silu", "after"


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def slopes(outputs, leaves):
    return torch.autograd.grad(transforms.loss(lambda *y: y)(*outputs), leaves)


def packed(tensors):
    """The inputs as the registered op takes them."""
    q, k, v, *state, alpha, eta, theta = tensors
    whole = pack(MemoryWeights(*state[:4]), MemoryWeights(*state[4:]))
    return [q, k, v, whole, alpha, eta, theta]


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_reference_passes_gradcheck(scan_op, activation):
    """Over two chunks, of which the last is shorter, for both ways of reading."""
    for read in ("after", "before"):
        op = scan_op.having(chunk=2, activation=activation, read=read)
        leaves = [x.requires_grad_() for x in op.draw(1, 3, 1, 2, 2, F64, rate=0.2)]
        assert torch.autograd.gradcheck(op.reference, leaves)


def test_registered_op_passes_opcheck(scan_op, device):
    leaves = [x.requires_grad_() for x in packed(scan_op.draw(*SIZES, F32, device))]
    written = torch.tensor([[[True], [False]]], device=device)
    torch.library.opcheck(OPS.memory_scan.default, (*leaves, written, *OPTIONS))


def test_registered_backward_op_passes_opcheck(scan_op, device):
    q, k, v, state, *gates = packed(scan_op.draw(*SIZES, F32, device))
    y, end, states = OPS.memory_scan(q, k, v, state, *gates, None, *OPTIONS)
    upstream = [torch.randn_like(x).requires_grad_() for x in (y, end)]
    leaves = [x.requires_grad_() for x in (q, k, v, state, states, *gates)]
    torch.library.opcheck(
        OPS.memory_scan_backward.default,
        (*upstream, *leaves, None, *OPTIONS),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_auto_is_the_reference_on_the_cpu(scan_op):
    leaves = [x.requires_grad_() for x in scan_op.draw(*SIZES)]
    found, expected = (scan_op.public(*leaves, backend=b) for b in ("auto", "reference"))
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad],
    ids=lambda transform: transform.__name__,
)
def test_transform_is_right(scan_op, transform, device):
    hold(scan_op, scan_op.draw(*SIZES, F32, device), transform)


def test_second_derivative_is_right(scan_op, device):
    op = scan_op.having(chunk=2, read="before")
    tensors = op.draw(1, 3, 1, 2, 3, F32, device)
    steepness = transforms.slopes_to_differentiate
    yardstick = Yardstick(steepness(op.reference), tensors, [torch.randn_like(x) for x in tensors])
    yardstick.check(steepness(op.kernels))


def test_func_grad_compiled_to_one_graph_is_right(scan_op, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(scan_op, scan_op.draw(*SIZES, F32, device), transforms.func_grad, compiler)


def test_full_graph_compilation_gives_eager_bits(scan_op, device):
    mask = torch.tensor([[True, False, True]], device=device)
    op = scan_op.having(chunk=2, write_mask=mask)
    leaves = [x.requires_grad_() for x in op.draw(1, 3, 1, 2, 3, F16, device)]
    expected = op.kernels(*leaves)
    found = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize("transform", transforms.FORWARD_MODES)
def test_forward_mode_raises(scan_op, transform, device):
    q, *others = scan_op.draw(*SIZES, F32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda q: scan_op.kernels(q, *others)[0], q)


def test_same_inputs_same_bits_whether_gradients_are_recorded_or_checkpointed(scan_op, device):
    op = scan_op.having(chunk=2)
    leaves = [x.requires_grad_() for x in op.draw(1, 3, 1, 2, 3, F16, device)]
    with torch.no_grad():
        quiet = op.kernels(*leaves)
    first = op.kernels(*leaves)
    again = checkpoint(op.kernels, *leaves, use_reentrant=False)
    assert same_bits(quiet, first)
    assert same_bits(again, first)
    assert same_bits(slopes(again, leaves), slopes(first, leaves))


@pytest.mark.parametrize("used", [slice(0, 1), slice(5, 6)], ids=["y", "momentum"])
def test_part_of_the_outputs_gives_part_of_the_gradients(scan_op, used, device):
    """What is not used weighs nothing, what does not ask gets nothing and changes nothing."""
    tensors = scan_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = scan_op.kernels(*leaves)[used]
    truth = torch.autograd.grad(sum(y.sum() for y in outputs), leaves)
    mixed = [
        leaf if place in (1, 3) else x
        for place, (leaf, x) in enumerate(zip(leaves, tensors, strict=True))
    ]
    outputs = scan_op.kernels(*mixed)[used]
    found = torch.autograd.grad(sum(y.sum() for y in outputs), (leaves[1], leaves[3]))
    assert same_bits(found, (truth[1], truth[3]))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["alike", "mixed"])
def test_autocast_casts_rows_as_for_a_matrix_product_and_leaves_the_state(
    scan_op, dtype, backend, device
):
    q, k, v, *others = (x for x in scan_op.draw(*SIZES, F32, device))
    leaves = [x.requires_grad_() for x in (q.to(dtype), k.to(dtype), v.to(dtype), *others)]
    with torch.autocast(device, BF16):
        y, *state = scan_op.public(*leaves, backend=backend)
    assert y.dtype == BF16
    assert {x.dtype for x in state} == {F32}
    grads = slopes((y, *state), leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]
    rows = (x.to(BF16) for x in (q, k, v))
    assert same_bits((y, *state), scan_op.public(*rows, *others, backend=backend))


def test_gates_of_another_dtype_get_gradients_in_it(scan_op, backend, device):
    *tensors, alpha, eta, theta = scan_op.draw(*SIZES, F32, device)
    gates = [x.to(BF16).requires_grad_() for x in (alpha, eta, theta)]
    outputs = scan_op.public(*tensors, *gates, backend=backend)
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), gates)
    assert [g.dtype for g in grads] == [BF16] * 3


def test_input_changed_after_the_forward_pass_is_noticed(scan_op, device):
    leaves = [x.requires_grad_() for x in scan_op.draw(*SIZES, F32, device)]
    outputs = scan_op.kernels(*leaves)
    with torch.no_grad():
        leaves[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_meta_tensors_get_shapes(scan_op):
    tensors = [x.to("meta") for x in scan_op.draw(2, 5, 3, 4, 6)]
    q, k, v, *state, alpha, eta, theta = tensors
    halves = MemoryWeights(*state[:4]), MemoryWeights(*state[4:])
    found = memory_scan(q, k, v, *halves, alpha, eta, theta, chunk=2)
    assert found.y.shape == (2, 5, 3, 4)
    assert [x.shape for x in found.momentum] == [x.shape for x in halves[1]]
    assert found.y.is_meta
