"""What autograd, transforms and compilers may do with memory_read, and its registration."""

from __future__ import annotations

import pytest
import torch
from fusewright.memory_mlp import MemoryWeights, memory_read, memory_scan
from fusewright.memory_mlp.common.weights import pack, pack_weights, unpack
from fusewright.memory_mlp.read import launch
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from torch.utils.checkpoint import checkpoint

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Rows, tokens, heads, D, hidden units.
SIZES = 1, 2, 2, 2, 3
OPS = torch.ops.fusewright_memory_mlp
OPTIONS = 3, "silu"


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def slopes(outputs, leaves):
    return torch.autograd.grad(transforms.loss(lambda *y: y)(*outputs), leaves)


def packed(tensors, halves=2):
    """The inputs as the registered op takes them."""
    q, *weights = tensors
    half = MemoryWeights(*weights)
    return q, pack_weights(half) if halves == 1 else pack(half, half)


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_reference_passes_gradcheck_twice(read_op, activation):
    op = read_op.having(activation=activation)
    leaves = [x.requires_grad_() for x in op.draw(1, 3, 2, 2, 2, F64)]
    assert torch.autograd.gradcheck(op.reference, leaves)
    assert torch.autograd.gradgradcheck(op.reference, leaves)


@pytest.mark.parametrize("halves", [1, 2])
def test_registered_op_passes_opcheck(read_op, halves, device):
    leaves = [x.requires_grad_() for x in packed(read_op.draw(*SIZES, F32, device), halves)]
    torch.library.opcheck(OPS.memory_read.default, (*leaves, *OPTIONS))


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_registered_backward_op_passes_opcheck(read_op, wanted, device):
    q, state = packed(read_op.draw(*SIZES, F32, device))
    leaves = [x.detach().requires_grad_() for x in (torch.randn_like(q), q, state)]
    torch.library.opcheck(
        OPS.memory_read_backward.default,
        (*leaves, *OPTIONS, *wanted),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_auto_is_the_reference_on_the_cpu(read_op):
    leaves = [x.requires_grad_() for x in read_op.draw(*SIZES)]
    found, expected = (read_op.public(*leaves, backend=b) for b in ("auto", "reference"))
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize(
    "transform",
    [transforms.func_grad, transforms.mapped_func_grad],
    ids=lambda transform: transform.__name__,
)
def test_transform_is_right(read_op, transform, device):
    hold(read_op, read_op.draw(*SIZES, F32, device), transform)


def test_second_derivative_is_right(read_op, device):
    tensors = read_op.draw(1, 3, 1, 2, 3, F32, device)
    steepness = transforms.slopes_to_differentiate
    upstream = [torch.randn_like(x) for x in tensors]
    yardstick = Yardstick(steepness(read_op.reference), tensors, upstream)
    yardstick.check(steepness(read_op.kernels))


@pytest.mark.parametrize("frozen", ["q", "weights"])
def test_second_derivative_is_right_where_one_of_both_is_constant(read_op, frozen, device):
    tensors = read_op.draw(1, 3, 1, 2, 3, F32, device)
    constants, leaves = (tensors[:1], tensors[1:]) if frozen == "q" else (tensors[1:], tensors[:1])

    def slopes_of(op):
        def part(*leaves):
            return op(*constants, *leaves) if frozen == "q" else op(*leaves, *constants)

        return transforms.slopes_to_differentiate(part)

    upstream = [torch.randn_like(x) for x in leaves]
    yardstick = Yardstick(slopes_of(read_op.reference), leaves, upstream)
    yardstick.check(slopes_of(read_op.kernels))


def test_func_grad_compiled_to_one_graph_is_right(read_op, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(read_op, read_op.draw(*SIZES, F32, device), transforms.func_grad, compiler)


def test_full_graph_compilation_gives_eager_bits(read_op, device):
    leaves = [x.requires_grad_() for x in read_op.draw(1, 3, 1, 2, 3, F16, device)]
    expected = read_op.kernels(*leaves)
    found = torch.compile(read_op.kernels, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


@pytest.mark.parametrize("transform", transforms.FORWARD_MODES)
def test_forward_mode_raises(read_op, transform, device):
    q, *others = read_op.draw(*SIZES, F32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda q: read_op.kernels(q, *others)[0], q)


def test_same_inputs_same_bits_whether_gradients_are_recorded_or_checkpointed(read_op, device):
    leaves = [x.requires_grad_() for x in read_op.draw(1, 3, 1, 2, 3, F16, device)]
    with torch.no_grad():
        quiet = read_op.kernels(*leaves)
    first = read_op.kernels(*leaves)
    again = checkpoint(read_op.kernels, *leaves, use_reentrant=False)
    assert same_bits(quiet, first)
    assert same_bits(again, first)
    assert same_bits(slopes(again, leaves), slopes(first, leaves))


@pytest.mark.parametrize("frozen", ["q", "weights"])
def test_what_asks_for_no_gradient_costs_none_and_changes_nothing(
    read_op, frozen, device, monkeypatch
):
    tensors = read_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    (y,) = read_op.kernels(*leaves)
    truth = torch.autograd.grad(y.sum(), leaves)
    asks = [(place == 0) == (frozen == "weights") for place in range(5)]
    for leaf, ask in zip(leaves, asks, strict=True):
        leaf.requires_grad_(ask)
    read_backward, seen = launch.read_backward, []

    def spy(*arguments):
        seen.append(arguments[-2:])
        return read_backward(*arguments)

    monkeypatch.setattr(launch, "read_backward", spy)
    (y,) = read_op.kernels(*leaves)
    wanted = [x for x, ask in zip(leaves, asks, strict=True) if ask]
    found = torch.autograd.grad(y.sum(), wanted)
    assert same_bits(found, [g for g, ask in zip(truth, asks, strict=True) if ask])
    assert seen == [(frozen == "weights", frozen == "q")]


def test_gradients_of_a_scan_and_of_a_read_of_the_same_state_add_up(scan_op, backend, device):
    """To the bit as where the read has tensors of its own."""
    q, k, v, *others = scan_op.draw(1, 3, 1, 2, 3, F32, device)
    leaves = [x.requires_grad_() for x in others[:8]]
    state = MemoryWeights(*leaves[:4]), MemoryWeights(*leaves[4:])
    found = []
    for copied in (False, True):
        first = memory_scan(q, k, v, *state, *others[8:], backend=backend)
        weights = first.weights.map(torch.clone) if copied else first.weights
        y = memory_read(q, weights, backend=backend)
        second = memory_scan(q, k, v, *first[1:], *others[8:], backend=backend)
        found.append([y, *torch.autograd.grad(y.sin().sum() + second.y.sin().sum(), leaves)])
    assert same_bits(*found)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["alike", "mixed"])
def test_autocast_casts_queries_as_for_a_matrix_product(read_op, dtype, backend, device):
    q, *weights = (x.requires_grad_() for x in read_op.draw(*SIZES, F32, device))
    q = q.detach().to(dtype).requires_grad_()
    with torch.autocast(device, BF16):
        (y,) = read_op.public(q, *weights, backend=backend)
    assert y.dtype == BF16
    grads = slopes([y], [q, *weights])
    assert [g.dtype for g in grads] == [dtype, *[F32] * 4]
    assert same_bits([y], read_op.public(q.to(BF16), *weights, backend=backend))


@pytest.mark.parametrize("place", [0, 1])
def test_input_changed_after_the_forward_pass_is_noticed(read_op, place, device):
    tensors = read_op.draw(*SIZES, F32, device)
    q, state = tensors[0].requires_grad_(), packed(tensors)[1].detach().requires_grad_()
    own = state * 1.0
    y = memory_read(q, unpack(own, 3, 2)[0], backend="triton")
    with torch.no_grad():
        (q, own)[place].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_meta_tensors_get_shapes(read_op):
    tensors = [x.to("meta") for x in read_op.draw(2, 5, 3, 4, 6)]
    (y,) = read_op.public(*tensors)
    assert y.shape == (2, 5, 3, 4)
    assert y.is_meta


def test_unknown_backend_is_named(read_op):
    with pytest.raises(ValueError, match='"auto", "triton" or "reference"'):
        read_op.public(*read_op.draw(*SIZES), backend="cuda")
