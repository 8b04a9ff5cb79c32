"""Every op under the transforms and compilers of docs/decisions/0001: right, or an error."""

from __future__ import annotations

import pytest
import torch
from fusewright.gsa import indexer_topk
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from torch.func import vmap

SHAPE = (1, 2, 3, 2, 3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.sampled
@pytest.mark.parametrize("transform", transforms.EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, op.draw(SHAPE, torch.float32, device), transform)


def test_mapping_over_no_samples_gives_none(op, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    found = vmap(op.kernels, (0, *(None for _ in others)))(x[None][:0], *others)
    assert found.shape == (0, *op.kernels(x, *others).shape)


@pytest.mark.sampled
@pytest.mark.parametrize("transform", [transforms.func_grad, transforms.mapped_func_grad])
def test_transform_compiled_to_one_graph_is_right(op, transform, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(op, op.draw(SHAPE, torch.float32, device), transform, compiler)


def test_second_derivative_is_right(op, device):
    tensors = op.draw(SHAPE, torch.float32, device)
    slopes = transforms.slopes_to_differentiate
    yardstick = Yardstick(slopes(op.reference), tensors, [torch.randn_like(t) for t in tensors])
    yardstick.check(slopes(op.kernels))


def test_selection_is_mapped_sample_by_sample(indexer, device):
    tensors = [torch.stack([x, 2 * x]) for x in indexer.draw(SHAPE, torch.float32, device)]

    def select(*tensors):
        counts = dict(k_base=2, k_min=1, k_max=3, law="fixed")
        return indexer_topk(*tensors, **counts, backend="triton")[:2]

    found = vmap(select)(*tensors)
    for index in range(2):
        expected = select(*(x[index] for x in tensors))
        assert all(torch.equal(f[index], e) for f, e in zip(found, expected, strict=True))


def test_one_compiled_graph_serves_any_number_of_queries(op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(op.kernels, fullgraph=True, dynamic=True, backend=counted)
    # No other axis has one of these lengths: dynamo would take it for the same.
    for queries in (5, 7, 9):
        tensors = op.draw((1, queries, 4, 2, 3), torch.float32, device)
        assert torch.equal(compiled(*tensors), op.kernels(*tensors))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_right_outputs_and_gradients(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, op.draw((1, 9, 12, 2, 5), dtype, device)).check(compiled)


@pytest.mark.parametrize("transform", transforms.FORWARD_MODES)
def test_forward_mode_raises(op, transform, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda x: op.kernels(x, *others), x)


@pytest.mark.sampled
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_autocast_multiplies_in_its_dtype(op, compiles, device):
    leaves = [t.requires_grad_() for t in op.draw(SHAPE, torch.float32, device)]
    kernels = (
        torch.compile(op.kernels, fullgraph=True, backend="aot_eager") if compiles else op.kernels
    )
    with torch.autocast(device, torch.bfloat16):
        y = kernels(*leaves)
    # Scores are fp32 whatever is multiplied.
    attends = op.name == "sparse_attention"
    assert y.dtype == (torch.bfloat16 if attends else torch.float32)
    products = 3 if attends else 2
    low = [t.bfloat16() for t in leaves[:products]] + leaves[products:]
    assert torch.equal(y, op.kernels(*low))
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]


def test_inference_mode_gives_the_same_bits(op, device):
    tensors = op.draw(SHAPE, torch.bfloat16, device)
    with torch.inference_mode():
        y = op.kernels(*tensors)
    assert y.is_inference()
    assert torch.equal(y, op.kernels(*tensors))


def test_input_changed_after_the_forward_pass_is_noticed(op, device):
    leaves = [t.requires_grad_() for t in op.draw(SHAPE, torch.float32, device)]
    y = op.kernels(*leaves)
    with torch.no_grad():
        leaves[-1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
