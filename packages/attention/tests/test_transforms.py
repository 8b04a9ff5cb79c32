"""Every op under the transforms and compilers of docs/decisions/0001: right, or an error."""

from __future__ import annotations

import pytest
import torch
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from fusewright_testkit.yardstick import as_tuple
from torch.func import vmap

# The rule of vmap takes one sample at a time, so tasks would prove nothing that heads do not.
SHAPE = (1, 5, 6, 2, 8)


@pytest.fixture(params=["lse_op", "window_op"])
def op(request: pytest.FixtureRequest):
    """One function of each registered op, with all its outputs."""
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.sampled
@pytest.mark.parametrize("transform", transforms.EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, op.draw(SHAPE, torch.float32, device), transform)


def test_jacobian_is_right(op, device):
    hold(op, op.draw((1, 2, 3, 1, 8), torch.float32, device), transforms.jacobian)


def test_mapping_over_no_samples_gives_none(op, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    in_dims = (0, *(None for _ in others))
    assert op.first(vmap(op.kernels, in_dims)(x[None][:0], *others)).shape == (0, *x.shape)


@pytest.mark.parametrize("transform", [transforms.func_grad, transforms.mapped_func_grad])
def test_transform_compiled_to_one_graph_is_right(op, transform, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(op, op.draw(SHAPE, torch.float32, device), transform, compiler)


@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks-allowed"])
def test_transform_of_tensors_that_require_gradients_compiles_right(op, fullgraph, device):
    """A module's own parameters reach a compiled torch.func.grad like this."""
    tensors = op.draw(SHAPE, torch.float32, device)
    compiled = torch.compile(
        transforms.func_grad(op.kernels), fullgraph=fullgraph, backend="aot_eager"
    )
    reference = transforms.detached(transforms.func_grad(op.reference))
    yardstick = Yardstick(reference, tensors, [None] * len(tensors))
    yardstick.check(lambda *leaves: compiled(*leaves))


@pytest.mark.parametrize("shape", [(2, 5, 6, 2, 8), (1, 5, 140, 1, 8)])
def test_second_derivative_is_right(op, shape, device):
    """Of keys that are one tile, and of more."""
    tensors = op.draw(shape, torch.float32, device)
    slopes = transforms.slopes_to_differentiate
    yardstick = Yardstick(slopes(op.reference), tensors, [torch.randn_like(t) for t in tensors])
    yardstick.check(slopes(op.kernels))


def test_one_compiled_graph_serves_any_number_of_queries(lse_op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lse_op.kernels, fullgraph=True, dynamic=True, backend=counted)
    for queries in (3, 5, 8):
        tensors = lse_op.draw((2, queries, 6, 2, 8), torch.float32, device)
        actual, expected = as_tuple(compiled(*tensors)), as_tuple(lse_op.kernels(*tensors))
        assert all(torch.equal(f, e) for f, e in zip(actual, expected, strict=True))
    assert len(graphs) == 1


def test_two_compiled_graphs_serve_any_number_of_keys(lse_op, device):
    """One for as many keys as are one tile, one for more."""
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lse_op.kernels, fullgraph=True, dynamic=True, backend=counted)
    for keys in (5, 31, 40, 130, 150):
        tensors = lse_op.draw((2, 7, keys, 1, 8), torch.float32, device)
        actual, expected = as_tuple(compiled(*tensors)), as_tuple(lse_op.kernels(*tensors))
        assert all(torch.equal(f, e) for f, e in zip(actual, expected, strict=True))
    assert len(graphs) == 2


def test_second_derivative_is_the_same_under_autocast(op, device):
    tensors = [x.requires_grad_() for x in op.draw(SHAPE, torch.float32, device)]
    slopes = transforms.slopes_to_differentiate(op.kernels)(*tensors)
    cotangents = [torch.randn_like(x) for x in slopes]
    actual = []
    for enabled in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            actual.append(torch.autograd.grad(slopes, tensors, cotangents, retain_graph=True))
    assert all(torch.equal(f, e) for f, e in zip(*actual, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [transforms.func_grad, transforms.mapped_func_grad])
def test_transform_compiled_by_inductor_is_right(op, transform, device):
    tensors = op.draw(SHAPE, torch.float32, device)
    hold(op, tensors, transform, torch.compile(fullgraph=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_right_outputs_and_gradients(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, op.draw(SHAPE, dtype, device)).check(compiled)


@pytest.mark.parametrize("transform", [*transforms.FORWARD_MODES, transforms.compiled_func_jvp])
def test_forward_mode_raises(op, transform, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda x: op.first(op.kernels(x, *others)), x)


@pytest.mark.parametrize("transform", [transforms.forward_mode, transforms.func_jvp])
def test_forward_mode_of_the_reference_is_right(op, transform):
    x, *others = op.draw(SHAPE, torch.float64, "cpu")

    def function(x):
        return op.first(op.public(x, *others, backend="reference"))

    _, expected = torch.autograd.functional.jvp(function, x, torch.ones_like(x))
    torch.testing.assert_close(transform(function, x), expected)


def test_inference_mode_gives_the_same_bits(op, device):
    tensors = op.draw(SHAPE, torch.bfloat16, device)
    with torch.inference_mode():
        y = op.first(op.kernels(*tensors))
    assert y.is_inference()
    assert torch.equal(y, op.first(op.kernels(*tensors)))


def test_input_changed_after_the_forward_pass_is_noticed(op, device):
    tensors = [t.requires_grad_() for t in op.draw(SHAPE, torch.float32, device)]
    y = op.first(op.kernels(*tensors))
    with torch.no_grad():
        tensors[-1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
