"""Every operation under the transforms of docs/decisions/0001: right, or an error."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from .. import transforms
from ..transforms import hold
from ..yardstick import Yardstick, as_tuple
from .compilers import fresh_compiler  # noqa: F401

F32, F64 = torch.float32, torch.float64
COMPILED = pytest.mark.parametrize(
    "transform", [transforms.func_grad, transforms.mapped_func_grad], ids=lambda t: t.__name__
)


@pytest.mark.sampled
@pytest.mark.parametrize("transform", transforms.EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, op.sample(op.small, F32, device), transform)


def test_jacobian_is_right(op, device):
    hold(op, op.sample(op.tiny, F32, device), transforms.jacobian)


def test_mapping_over_no_samples_gives_none(op, device):
    x, *others = op.sample(op.small, F32, device)
    found = as_tuple(vmap(op.kernels, (0, *(None for _ in others)))(x[None][:0], *others))
    expected = as_tuple(op.kernels(x, *others))
    assert [y.shape for y in found] == [(0, *y.shape) for y in expected]


@COMPILED
@pytest.mark.sampled
def test_transform_compiled_to_one_graph_is_right(op, transform, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(op, op.sample(op.small, F32, device), transform, compiler)


@pytest.mark.sampled
@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks-allowed"])
def test_transform_of_tensors_that_require_gradients_compiles_right(op, fullgraph, device):
    """A module's own parameters reach a compiled torch.func.grad like this."""
    tensors = op.sample(op.small, F32, device)
    compiled = torch.compile(
        transforms.func_grad(op.kernels), fullgraph=fullgraph, backend="aot_eager"
    )
    reference = transforms.detached(transforms.func_grad(op.reference))
    yardstick = Yardstick(reference, tensors, [None] * len(tensors))
    yardstick.check(lambda *leaves: compiled(*leaves))


@COMPILED
@pytest.mark.slow
def test_transform_compiled_by_inductor_is_right(op, transform, device):
    tensors = op.sample(op.small, F32, device)
    hold(op, tensors, transform, torch.compile(fullgraph=True))


@pytest.mark.sampled
def test_second_derivative_is_right(form, device):
    tensors = form.sample(form.small, F32, device)
    slopes = transforms.slopes_to_differentiate
    yardstick = Yardstick(slopes(form.reference), tensors, [torch.randn_like(t) for t in tensors])
    yardstick.check(slopes(form.kernels))


@pytest.mark.sampled
def test_third_derivative_is_right(op, device):
    def steepness(call):
        def of_leaves(*leaves):
            value = sum(y.cos().sum() for y in as_tuple(call(*leaves)))
            for _ in range(2):
                grads = torch.autograd.grad(value, leaves, create_graph=True)
                value = sum(g.square().sum() for g in grads)
            return torch.autograd.grad(value, leaves, create_graph=True)

        return of_leaves

    tensors = op.sample(op.tiny, F32, device)
    # The third derivatives are outputs here; no fourth is taken of them.
    yardstick = Yardstick(steepness(op.reference), tensors, [None] * len(tensors))
    yardstick.check(steepness(op.kernels))


@pytest.mark.parametrize(
    "transform", [*transforms.FORWARD_MODES, transforms.compiled_func_jvp], ids=lambda t: t.__name__
)
def test_forward_mode_raises(op, transform, device):
    x, *others = op.sample(op.small, F32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda x: op.first(op.kernels(x, *others)), x)


@pytest.mark.parametrize(
    "transform", [transforms.forward_mode, transforms.func_jvp], ids=lambda t: t.__name__
)
def test_forward_mode_of_the_reference_is_right(op, transform):
    x, *others = op.sample(op.tiny, F64, "cpu")

    def function(x):
        # What is added to all numbers may change nothing; to their roots it does.
        return op.first(op.public(x * x.cos(), *others, backend="reference"))

    _, expected = torch.autograd.functional.jvp(function, x, torch.ones_like(x))
    torch.testing.assert_close(transform(function, x), expected)
