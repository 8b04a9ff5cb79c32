"""Every op under the transforms and compilers of docs/decisions/0001: right, or an error."""

from __future__ import annotations

import pytest
import torch
from fusewright.feed_forward import silu_mul
from fusewright.feed_forward.gating import reference
from fusewright_testkit import Yardstick, transforms
from fusewright_testkit.transforms import hold
from torch.func import vmap

SHAPE = (3, 20)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("transform", transforms.EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, op.draw(SHAPE, torch.float32, device), transform)


def test_jacobian_is_right(op, device):
    hold(op, op.draw((2, 5), torch.float32, device), transforms.jacobian)


def test_mapping_over_single_numbers_is_right(device):
    yardstick = Yardstick(reference.silu_mul, [*torch.randn(2, 7, device=device)])
    yardstick.check(vmap(lambda gate, up: silu_mul(gate, up, backend="triton")))


def test_mapping_over_no_samples_gives_none(op, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    in_dims = (0, *(None for _ in others))
    assert vmap(op.kernels, in_dims)(x[None][:0], *others).shape == (0, *SHAPE)


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
    expected = transforms.detached(transforms.func_grad(op.reference))
    yardstick = Yardstick(expected, tensors, [None] * len(tensors))
    yardstick.check(lambda *leaves: compiled(*leaves))


def test_second_derivative_is_right(op, device):
    tensors = op.draw(SHAPE, torch.float32, device)
    slopes = transforms.slopes_to_differentiate
    yardstick = Yardstick(slopes(op.reference), tensors, [torch.randn_like(t) for t in tensors])
    yardstick.check(slopes(op.kernels))


def test_one_compiled_graph_serves_any_number_of_rows(op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(op.kernels, fullgraph=True, dynamic=True, backend=counted)
    for rows in (3, 5, 8):
        tensors = op.draw((rows, 20), torch.float32, device)
        assert torch.equal(compiled(*tensors), op.kernels(*tensors))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_right_outputs_and_gradients(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, op.draw(SHAPE, dtype, device)).check(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [transforms.func_grad, transforms.mapped_func_grad])
def test_transform_compiled_by_inductor_is_right(op, transform, device):
    tensors = op.draw(SHAPE, torch.float32, device)
    hold(op, tensors, transform, torch.compile(fullgraph=True))


@pytest.mark.parametrize("transform", [*transforms.FORWARD_MODES, transforms.compiled_func_jvp])
def test_forward_mode_raises(op, transform, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda x: op.kernels(x, *others), x)


@pytest.mark.parametrize("transform", [transforms.forward_mode, transforms.func_jvp])
def test_forward_mode_of_the_reference_is_right(op, transform):
    x, *others = op.draw(SHAPE, torch.float64, "cpu")

    def function(x):
        return op.public(x, *others, backend="reference")

    _, expected = torch.autograd.functional.jvp(function, x, torch.ones_like(x))
    torch.testing.assert_close(transform(function, x), expected)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtypes_of_torch_and_gradients_in_those_of_the_inputs(
    op, dtype, compiles, device
):
    leaves = [t.requires_grad_() for t in op.draw(SHAPE, dtype, device)]
    kernels = (
        torch.compile(op.kernels, fullgraph=True, backend="aot_eager") if compiles else op.kernels
    )
    with torch.autocast(device, torch.bfloat16):
        y, expected = kernels(*leaves), op.twin(*leaves)
    assert y.dtype == expected.dtype
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]
    assert all(bool(g.any()) for g in grads)


def test_inference_mode_gives_the_same_bits(op, device):
    tensors = op.draw(SHAPE, torch.bfloat16, device)
    with torch.inference_mode():
        y = op.kernels(*tensors)
    assert y.is_inference()
    assert torch.equal(y, op.kernels(*tensors))
