"""Lengths of keys, schemes, tasks, and mixed dtypes under autocast."""

from __future__ import annotations

import pytest
import torch
from fusewright import attention
from fusewright_testkit import transforms
from fusewright_testkit.conformance import everything, same_bits
from fusewright_testkit.yardstick import as_tuple
from torch._dynamo.testing import CompileCounter

from .operations import LSE_OP, WINDOW_OP

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SHAPE = (2, 5, 6, 2, 8)


def test_lengths_do_not_recompile(op, device):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(op.kernels, fullgraph=True, backend=counter)
    tensors = op.draw(SHAPE, F32, device)
    for lengths in ([1, 2], [6, 0], [3, 3]):
        key_lengths = torch.tensor(lengths, device=device)
        actual = op.first(compiled(*tensors, key_lengths))
        assert torch.equal(actual, op.first(op.kernels(*tensors, key_lengths)))
    assert counter.frame_count == 1


def test_same_inputs_same_bits_with_and_without_gradients(lse_op, scheme, device):
    leaves = lse_op.leaves(lse_op.several, BF16, device)
    expected = everything(lse_op.kernels, leaves)
    assert same_bits(everything(lse_op.kernels, leaves), expected)
    with torch.no_grad():
        assert same_bits(lse_op.kernels(*leaves), expected[:2])


def test_both_functions_give_the_same_bits(lse_op, scheme, device):
    tensors = lse_op.draw((2, 20, 24, 1, 16), BF16, device)
    alone = attention.rectangular_attention(*tensors, backend="triton")
    o, _ = attention.rectangular_attention_with_lse(*tensors, backend="triton")
    assert torch.equal(alone, o)


def test_tasks_do_not_see_one_another(lse_op, scheme, device):
    tensors = [x.requires_grad_() for x in lse_op.draw((3, 20, 24, 1, 16), F32, device)]
    with_nan = [x.detach().clone() for x in tensors]
    for x in with_nan:
        x[1] = float("nan")
    with_nan = [x.requires_grad_() for x in with_nan]

    found, expected = (everything(lse_op.kernels, leaves) for leaves in (with_nan, tensors))
    for actual, truth in zip(found, expected, strict=True):
        assert actual[1].isnan().all()
        assert torch.equal(actual[[0, 2]], truth[[0, 2]])


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_autocast_casts_mixed_operands_as_for_a_matrix_product(op, backend, device):
    q, k, v = op.draw(SHAPE, F32, device)
    tensors = [x.requires_grad_() for x in (q, k.to(BF16), v)]
    with torch.autocast(device, torch.bfloat16):
        o = op.first(op.public(*tensors, backend=backend))
    assert o.dtype == BF16
    grads = torch.autograd.grad(o.sum(), tensors)
    assert [g.dtype for g in grads] == [F32, BF16, F32]
    expected = op.first(op.public(*(x.bfloat16() for x in tensors), backend=backend))
    assert torch.equal(o, expected)


def test_autocast_leaves_fp64_alone(op, device):
    with torch.autocast(device, torch.bfloat16):
        o = op.first(op.public(*op.draw(SHAPE, F64, device), backend="reference"))
    assert o.dtype == F64


def test_fp64_with_another_dtype_is_refused_under_autocast(op, device):
    """Autocast leaves fp64 tensors as they are, and torch's attention takes one dtype."""
    q, k, v = op.draw(SHAPE, F32, device)
    for tensors in ((q, k.double(), v), (q.double(), k, v)):
        with (
            torch.autocast(device, torch.bfloat16),
            pytest.raises(ValueError, match="k must have q's dtype"),
        ):
            op.public(*tensors)


def test_two_compiled_graphs_serve_any_number_of_keys(lse_op, device):
    """One for as many keys as are one tile, one for more."""
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lse_op.kernels, fullgraph=True, dynamic=True, backend=counted)
    for keys in (5, 31, 40, 130, 150):
        tensors = lse_op.draw((2, 7, keys, 1, 8), F32, device)
        actual, expected = as_tuple(compiled(*tensors)), as_tuple(lse_op.kernels(*tensors))
        assert all(torch.equal(f, e) for f, e in zip(actual, expected, strict=True))
    assert len(graphs) == 2


@pytest.mark.parametrize("op", [LSE_OP, WINDOW_OP], ids=lambda op: op.name)
def test_second_derivative_is_the_same_under_autocast(op, device):
    tensors = [x.requires_grad_() for x in op.draw(SHAPE, F32, device)]
    slopes = transforms.slopes_to_differentiate(op.kernels)(*tensors)
    cotangents = [torch.randn_like(x) for x in slopes]
    actual = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            actual.append(torch.autograd.grad(slopes, tensors, cotangents, retain_graph=True))
    assert all(torch.equal(f, e) for f, e in zip(*actual, strict=True))
