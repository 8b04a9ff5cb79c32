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

SHAPE = (4, 5)
SAMPLES = 2
Call = Callable[..., object]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def loss(call: Call) -> Call:
    """One number in which every output counts, each with a gradient of its own."""

    def of_tensors(*tensors):
        y = call(*tensors)
        ramp = torch.linspace(-1.0, 2.0, y.numel(), device=y.device).view_as(y)
        return (y * ramp.to(y.dtype)).square().sum()

    return of_tensors


def every(tensors) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def samples(x):
    return torch.stack([x * (1 + sample) + sample for sample in range(SAMPLES)])


def func_grad(call):
    return lambda *tensors: grad(loss(call), every(tensors))(*tensors)


def ended_vjp(call):
    """The pullback, called when no transform is active any more."""

    def pulled(*tensors):
        y, pullback = vjp(call, *tensors)
        return pullback(torch.ones_like(y))

    return pulled


def batched_cotangents(call):
    """Autograd's own batch of gradients, which maps over the backward pass alone."""

    def pulled(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = call(*leaves)
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


def func_grad_twice(call):
    def steepness(*tensors):
        return sum(s.square().sum() for s in grad(loss(call), every(tensors))(*tensors))

    return lambda *tensors: grad(steepness, every(tensors))(*tensors)


def jacobian(call):
    return lambda *tensors: jacrev(call, every(tensors))(*tensors)


EAGER = [
    func_grad,
    ended_vjp,
    batched_cotangents,
    mapped,
    mapped_together,
    mapped_func_grad,
    func_grad_of_map,
    func_grad_twice,
    jacobian,
]


def hold(op, device, transform: Call, run: Call = lambda function: function) -> None:
    """The transform of the kernels, as ``run`` runs it, against that of the reference."""
    tensors = op.draw(SHAPE, torch.float32, device)

    def detached(call):
        return lambda *leaves: as_tuple(call(*(t.detach() for t in leaves)))

    outputs = len(detached(transform(op.reference))(*tensors))
    yardstick = Yardstick(detached(transform(op.reference)), tensors, [None] * outputs)
    yardstick.check(detached(run(transform(op.kernels))))


@pytest.mark.parametrize("transform", EAGER, ids=lambda transform: transform.__name__)
def test_transform_is_right(op, transform, device):
    hold(op, device, transform)


def test_mask_and_parameters_are_mapped_together(mixture, device, draw_mixtures):
    params, y = draw_mixtures((3, *SHAPE), torch.float32, device)
    mask = torch.rand(y.shape, device=device) < 0.5
    found = vmap(mixture.kernels)(params, y, mask)
    expected = [mixture.kernels(*sample) for sample in zip(params, y, mask, strict=True)]
    assert torch.equal(found, torch.stack(expected))


def test_mapping_over_no_samples_gives_none(op, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    found = vmap(op.kernels, (0, *(None for _ in others)))(x[None][:0], *others)
    assert found.shape == (0, *op.kernels(x, *others).shape)


@pytest.mark.parametrize("transform", [func_grad, mapped_func_grad])
def test_transform_compiled_to_one_graph_is_right(op, transform, device):
    hold(op, device, transform, torch.compile(fullgraph=True, backend="aot_eager"))


def test_second_derivative_is_right(op, scale, device):
    options = {} if op.name == "grouped_heads" else dict(scale=scale)
    tensors = op.draw(SHAPE, torch.float32, device)

    def slopes(call):
        def of_leaves(*leaves):
            value = loss(lambda *t: call(*t, **options))(*leaves)
            return torch.autograd.grad(value, leaves, create_graph=True)

        return of_leaves

    yardstick = Yardstick(slopes(op.reference), tensors, [torch.randn_like(t) for t in tensors])
    yardstick.check(slopes(op.kernels))


def test_one_compiled_graph_serves_any_number_of_rows(op, device):
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(op.kernels, fullgraph=True, dynamic=True, backend=counted)
    # No other axis has one of these lengths: dynamo would take it for the same.
    for rows in (7, 9, 13):
        tensors = op.draw((rows, 5), torch.float32, device)
        assert torch.equal(compiled(*tensors), op.kernels(*tensors))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_right_outputs_and_gradients(op, dtype, device):
    compiled = torch.compile(op.kernels, fullgraph=True)
    Yardstick(op.reference, op.draw((100, 5), dtype, device)).check(compiled)


def forward_mode(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


def func_jvp(function, x):
    return jvp(function, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("transform", [forward_mode, func_jvp])
def test_forward_mode_raises(op, transform, device):
    x, *others = op.draw(SHAPE, torch.float32, device)
    with pytest.raises(Exception, match=r"jvp|forward.mode AD"):
        transform(lambda x: op.kernels(x, *others), x)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_results_in_fp32_and_gradients_in_the_dtypes_of_the_inputs(
    op, dtype, compiles, device
):
    leaves = [t.requires_grad_() for t in op.draw(SHAPE, dtype, device)]
    kernels = (
        torch.compile(op.kernels, fullgraph=True, backend="aot_eager") if compiles else op.kernels
    )
    with torch.autocast(device, torch.bfloat16):
        y = kernels(*leaves)
    assert y.dtype == torch.float32
    grads = torch.autograd.grad(y.square().sum(), leaves)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]
    assert all(bool(g.any()) for g in grads)


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
