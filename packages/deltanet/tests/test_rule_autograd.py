"""What autograd, transforms and compilers may do with gated_delta_rule, and its registration."""

from __future__ import annotations

import pytest
import torch
from fusewright.deltanet import gated_delta_rule
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from torch.utils.checkpoint import checkpoint

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Rows, tokens, heads, K, V.
SIZES = 1, 2, 1, 2, 3
OPS = torch.ops.fusewright_deltanet


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def same_bits(found, truth):
    return all(torch.equal(f, t) for f, t in zip(found, truth, strict=True))


def slopes(outputs, leaves):
    return torch.autograd.grad(transforms.loss(lambda *y: y)(*outputs), leaves)


@pytest.mark.parametrize("heads", [1, (1, 2)])
def test_reference_passes_gradcheck(rule_op, heads):
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 3, heads, 2, 2, F64)]
    assert torch.autograd.gradcheck(rule_op.reference, leaves)
    assert torch.autograd.gradgradcheck(rule_op.reference, leaves)


def test_reference_passes_gradcheck_over_two_chunks(rule_op):
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 65, 1, 1, 1, F64)]
    assert torch.autograd.gradcheck(rule_op.reference, leaves)


# With a state, without, and with sequences that fill all chunks that are launched.
OPERANDS = {
    "state": (2, True, None),
    "zeros": (2, False, None),
    "sequences": (65, True, [0, 64, 65]),
}


def operands_of(name, rule_op, device):
    tokens, starts, lengths = OPERANDS[name]
    *tensors, state = rule_op.draw(1, tokens, 1, 2, 3, F32, device, sequences=2 if lengths else 1)
    leaves = [x.requires_grad_() for x in (*tensors, state)]
    lengths = None if lengths is None else torch.tensor(lengths, device=device)
    return *leaves[:5], leaves[5] if starts else None, lengths


@pytest.mark.parametrize("name", OPERANDS)
def test_registered_op_passes_opcheck(rule_op, name, device):
    torch.library.opcheck(OPS.gated_delta_rule.default, (*operands_of(name, rule_op, device), 0.3))


@pytest.mark.parametrize("name", ["state", "zeros"])
def test_registered_backward_op_passes_opcheck(rule_op, name, device):
    operands = [x if x is None else x.detach() for x in operands_of(name, rule_op, device)]
    o, end, *saved = OPS.gated_delta_rule(*operands, 0.3)
    upstream = [torch.randn_like(x).requires_grad_() for x in (o, end)]
    leaves = [x if x is None else x.requires_grad_() for x in (*operands[:6], *saved)]
    leaves.insert(6, operands[6])
    # The derivative of the backward pass treats the saved tensors as constants.
    torch.library.opcheck(
        OPS.gated_delta_rule_backward.default,
        (*upstream, *leaves, 0.3),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("transform", transforms.EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(rule_op, transform, device):
    hold(rule_op, rule_op.draw(*SIZES, F32, device), transform)


def test_second_derivative_is_right(rule_op, device):
    tensors = rule_op.draw(1, 3, 1, 2, 3, F32, device)
    steepness = transforms.slopes_to_differentiate
    yardstick = Yardstick(
        steepness(rule_op.reference), tensors, [torch.randn_like(x) for x in tensors]
    )
    yardstick.check(steepness(rule_op.kernels))


def test_func_grad_compiled_to_one_graph_is_right(rule_op, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(rule_op, rule_op.draw(*SIZES, F32, device), transforms.func_grad, compiler)


@pytest.mark.parametrize("name", ["state", "sequences"])
def test_full_graph_compilation_gives_eager_bits(rule_op, name, device):
    *leaves, lengths = operands_of(name, rule_op, device)
    op = rule_op.having(cu_seqlens=lengths)
    expected = op.kernels(*leaves)
    found = torch.compile(op.kernels, fullgraph=True, backend="aot_eager")(*leaves)
    assert same_bits(found, expected)
    assert same_bits(slopes(found, leaves), slopes(expected, leaves))


def test_one_compiled_graph_serves_any_number_of_tokens(rule_op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(rule_op.kernels, fullgraph=True, dynamic=True, backend=counted)
    # One chunk is a kind of its own: torch treats a length of 1 as a constant.
    for tokens in (66, 70, 130):
        tensors = rule_op.draw(1, tokens, 1, 4, 3, F32, device)
        assert same_bits(compiled(*tensors), rule_op.kernels(*tensors))
    assert len(graphs) == 1


@pytest.mark.parametrize("transform", transforms.FORWARD_MODES)
def test_forward_mode_raises(rule_op, transform, device):
    q, *others = rule_op.draw(*SIZES, F32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda q: rule_op.kernels(q, *others)[0], q)


def test_same_inputs_same_bits_whether_gradients_are_recorded_or_checkpointed(rule_op, device):
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 3, (1, 2), 2, 3, F16, device)]
    with torch.no_grad():
        quiet = rule_op.kernels(*leaves)
    first = rule_op.kernels(*leaves)
    again = checkpoint(rule_op.kernels, *leaves, use_reentrant=False)
    assert same_bits(quiet, first)
    assert same_bits(again, first)
    assert same_bits(slopes(again, leaves), slopes(first, leaves))


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2)], ids=["o", "state"])
def test_part_of_the_outputs_gives_part_of_the_gradients(rule_op, used, device):
    """What is not used weighs nothing, what does not ask gets nothing and changes nothing."""
    tensors = rule_op.draw(*SIZES, F32, device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    y = rule_op.kernels(*leaves)[used][0]
    truth = torch.autograd.grad(y.sum(), leaves, materialize_grads=True)
    mixed = [
        leaf if place in (1, 3) else x
        for place, (leaf, x) in enumerate(zip(leaves, tensors, strict=True))
    ]
    y = rule_op.kernels(*mixed)[used][0]
    found = torch.autograd.grad(y.sum(), (leaves[1], leaves[3]))
    assert same_bits(found, (truth[1], truth[3]))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["alike", "mixed"])
def test_autocast_casts_rows_as_for_a_matrix_product_and_leaves_the_state(
    rule_op, dtype, backend, device
):
    q, k, v, *others = rule_op.draw(*SIZES, F32, device)
    leaves = [x.requires_grad_() for x in (q.to(dtype), k.to(dtype), v.to(dtype), *others)]
    with torch.autocast(device, BF16):
        o, state = rule_op.public(*leaves, backend=backend)
    assert o.dtype == BF16
    assert state.dtype == F32
    grads = slopes((o, state), leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]
    rows = (x.to(BF16) for x in (q, k, v))
    assert same_bits((o, state), rule_op.public(*rows, *others, backend=backend))


def test_gates_of_another_dtype_get_gradients_in_it(rule_op, backend, device):
    q, k, v, g, beta, state = rule_op.draw(*SIZES, F32, device)
    gates = [x.to(BF16).requires_grad_() for x in (g, beta)]
    outputs = rule_op.public(q, k, v, *gates, state, backend=backend)
    grads = torch.autograd.grad(sum(y.sum() for y in outputs), gates)
    assert [g.dtype for g in grads] == [BF16] * 2


def test_input_changed_after_the_forward_pass_is_noticed(rule_op, device):
    """Of narrower heads the kernels keep copies, which stay as they were."""
    leaves = [x.requires_grad_() for x in rule_op.draw(1, 2, 1, 16, 16, F32, device)]
    o, _ = rule_op.kernels(*leaves)
    with torch.no_grad():
        leaves[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(("tokens", "chunks"), [(3, 1), (64, 1), (65, 2)])
def test_what_is_kept_beside_the_inputs_is_linear_in_the_chunks(rule_op, tokens, chunks, device):
    leaves = [x.requires_grad_() for x in rule_op.draw(1, tokens, 2, 16, 32, F16, device)]
    inputs = {x.data_ptr() for x in leaves}
    kept: list[int] = []

    def seen(x):
        kept.append(0 if x.data_ptr() in inputs else x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
        rule_op.kernels(*leaves)
    assert sum(kept) == chunks * 2 * (64 * 64 + 16 * 32 + 64)


def test_meta_tensors_get_shapes(rule_op):
    tensors = [x.to("meta") for x in rule_op.draw(2, 5, (3, 6), 4, 7)]
    found = gated_delta_rule(*tensors[:5], initial_state=tensors[5], output_final_state=True)
    assert found.o.shape == (2, 5, 6, 7)
    assert found.state.shape == (2, 6, 4, 7)
    assert found.o.is_meta
