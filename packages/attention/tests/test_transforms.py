"""Every op under the transforms and compilers of docs/decisions/0001: right, or an error.

Each transform of the kernels is held to the same transform of the reference, run eagerly, by the
yardstick: against fp64, with the error that plain torch makes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusewright_testkit import Yardstick
from fusewright_testkit.yardstick import as_tuple
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

SHAPE = (2, 5, 6, 2, 8)
SAMPLES = 2
Call = Callable[..., object]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def loss(call: Call) -> Call:
    """One number in which every output counts, with a gradient that differs from column to
    column.
    """

    def of_tensors(*tensors):
        return sum((y * ramp(y)).square().sum() for y in as_tuple(call(*tensors)))

    return of_tensors


def ramp(y):
    return torch.linspace(-1.0, 2.0, y.shape[-1], device=y.device).to(y.dtype)


def every(tensors) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def detached(transform: Call) -> Call:
    """The transform of tensors that do not require a gradient themselves."""
    return lambda *tensors: transform(*(t.detach() for t in tensors))


def func_grad(call):
    return lambda *tensors: grad(loss(call), every(tensors))(*tensors)


def first_of(call):
    """o alone."""
    return lambda *tensors: as_tuple(call(*tensors))[0]


def ended_vjp(call):
    """The pullback, called when no transform is active any more."""

    def pulled(*tensors):
        y, pullback = vjp(first_of(call), *tensors)
        return pullback(
            torch.linspace(-1.0, 2.0, y.numel(), device=y.device).view_as(y).to(y.dtype)
        )

    return pulled


def batched_cotangents(call):
    """Autograd's own batch of gradients, which maps over the backward pass alone."""

    def pulled(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = first_of(call)(*leaves)
        batch = torch.stack([y.detach().cos(), torch.ones_like(y)])
        return torch.autograd.grad(y, leaves, batch, is_grads_batched=True)

    return pulled


def mapped(call):
    """Over a new axis of the first operand alone."""
    return lambda x, *others: vmap(call, (0, *(None for _ in others)))(samples(x), *others)


def mapped_together(call):
    """Over a new last axis of every operand."""
    return lambda *tensors: vmap(call, in_dims=-1)(*(samples(t).movedim(0, -1) for t in tensors))


def mapped_func_grad(call):
    def of_tensors(x, *others):
        slopes = grad(loss(call), every((x, *others)))
        return vmap(slopes, (0, *(None for _ in others)))(samples(x), *others)

    return of_tensors


def func_grad_of_map(call):
    return lambda *tensors: grad(lambda *t: loss(mapped(call))(*t), every(tensors))(*tensors)


def func_grad_of_primal_of_vjp(call):
    def primal(*tensors):
        return vjp(lambda *t: loss(call)(*t), *tensors)[0]

    return lambda *tensors: grad(primal, every(tensors))(*tensors)


def func_grad_twice(call):
    def steepness(*tensors):
        return sum(s.square().sum() for s in grad(loss(call), every(tensors))(*tensors))

    return lambda *tensors: grad(steepness, every(tensors))(*tensors)


def samples(x):
    return torch.stack([x * (1 + sample) + sample for sample in range(SAMPLES)])


EAGER = [
    ended_vjp,
    batched_cotangents,
    func_grad,
    mapped,
    mapped_together,
    mapped_func_grad,
    func_grad_of_map,
    func_grad_of_primal_of_vjp,
    func_grad_twice,
]


def hold(op, device, transform: Call, run: Call = lambda function: function) -> None:
    """The transform of the kernels, as ``run`` runs it, against that of the reference."""
    tensors = op.draw(SHAPE, torch.float32, device)
    outputs = len(transform(op.reference)(*tensors))
    yardstick = Yardstick(detached(transform(op.reference)), tensors, [None] * outputs)
    yardstick.check(detached(run(transform(op.kernels))))


def tuple_of(transform: Call) -> Call:
    return lambda call: lambda *tensors: as_tuple(transform(call)(*tensors))


@pytest.mark.parametrize("transform", EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, device, tuple_of(transform))


def test_jacobian_is_right(op, device):
    def jacobian(call):
        return lambda *tensors: jacrev(lambda *t: op.first(call(*t)), every(tensors))(*tensors)

    tensors = op.draw((1, 2, 3, 1, 8), torch.float32, device)
    yardstick = Yardstick(detached(jacobian(op.reference)), tensors, [None] * len(tensors))
    yardstick.check(detached(jacobian(op.kernels)))


def test_mapping_over_no_samples_gives_none(op, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    in_dims = (0, *(None for _ in others))
    assert op.first(vmap(op.kernels, in_dims)(x[None][:0], *others)).shape == (0, *x.shape)


@pytest.mark.parametrize("transform", [func_grad, mapped_func_grad])
def test_transform_compiled_to_one_graph_is_right(op, transform, device):
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    hold(op, device, tuple_of(transform), compiler)


@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks-allowed"])
def test_transform_of_tensors_that_require_gradients_compiles_right(op, fullgraph, device):
    """A module's own parameters reach a compiled torch.func.grad like this."""
    tensors = op.draw(SHAPE, torch.float32, device)
    compiled = torch.compile(func_grad(op.kernels), fullgraph=fullgraph, backend="aot_eager")
    yardstick = Yardstick(detached(func_grad(op.reference)), tensors, [None] * len(tensors))
    yardstick.check(lambda *leaves: compiled(*leaves))


@pytest.mark.parametrize("keys", [6, 140])
def test_second_derivative_is_right(op, keys, device):
    tensors = op.draw((2, 5, keys, 2, 8), torch.float32, device)

    def slopes(call):
        return lambda *leaves: torch.autograd.grad(loss(call)(*leaves), leaves, create_graph=True)

    yardstick = Yardstick(slopes(op.reference), tensors, [torch.randn_like(t) for t in tensors])
    yardstick.check(slopes(op.kernels))


def test_one_compiled_graph_serves_any_number_of_queries(op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(op.kernels, fullgraph=True, dynamic=True, backend=counted)
    for queries in (3, 5, 8):
        tensors = op.draw((2, queries, 6, 2, 8), torch.float32, device)
        found, expected = as_tuple(compiled(*tensors)), as_tuple(op.kernels(*tensors))
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("transform", [func_grad, mapped_func_grad])
def test_transform_compiled_by_inductor_is_right(op, transform, device):
    hold(op, device, tuple_of(transform), torch.compile(fullgraph=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_right_outputs_and_gradients(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, op.draw(SHAPE, dtype, device)).check(compiled)


def forward_mode(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def func_jvp(function, x):
    return jvp(function, (x,), (torch.ones_like(x),))


def compiled_func_jvp(function, x):
    return torch.compile(lambda x: func_jvp(function, x), fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parametrize("transform", [forward_mode, func_jvp, compiled_func_jvp])
def test_forward_mode_raises(op, transform, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda x: op.first(op.kernels(x, *others)), x)


@pytest.mark.parametrize("transform", [forward_mode, func_jvp])
def test_forward_mode_of_the_reference_works(op, transform):
    x, *others = op.draw(SHAPE, torch.float64, "cpu")
    transform(lambda x: op.first(op.public(x, *others, backend="reference")), x)


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
