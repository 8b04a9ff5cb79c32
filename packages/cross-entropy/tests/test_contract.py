"""What holds of the function: bits, strides, compilation, transforms."""

from __future__ import annotations

import pytest
import torch
from fusewright.cross_entropy import linear_cross_entropy
from fusewright.cross_entropy.linear import linear_cross_entropy as module


def operands(device="cpu", dtype=torch.float32):
    x = torch.randn(7, 8, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(20, 8, device=device, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(20, (7,), device=device)


def everything(call, x, weight, targets):
    loss = call(x, weight, targets)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_same_inputs_same_bits(backend, device):
    given = operands(device)

    def call(*tensors):
        return linear_cross_entropy(*tensors, backend=backend)

    first, second = (everything(call, *given) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_strided_operands_are_read_by_their_strides(backend, device, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 60)
    monkeypatch.setattr(module, "CHUNK_ROWS", 1)
    x, weight, targets = operands(device)
    strided = [
        torch.stack([x, x], -1)[..., 0].detach().requires_grad_(),
        weight.detach().T.contiguous().T.requires_grad_(),
        torch.stack([targets, targets], -1)[..., 0],
    ]
    assert not any(t.is_contiguous() for t in strided)

    def call(*tensors):
        return linear_cross_entropy(*tensors, backend=backend)

    found, expected = everything(call, *strided), everything(call, x, weight, targets)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("held", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_ignored_rows_may_hold_anything(backend, held, dtype, device):
    x, weight, targets = operands(device, dtype)
    targets[2] = -100
    poisoned = x.detach().clone()
    poisoned[2] = held

    def call(*tensors):
        return linear_cross_entropy(*tensors, backend=backend)

    found, expected = (
        everything(call, t.detach().requires_grad_(), weight, targets) for t in (poisoned, x)
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_one_graph_has_the_loss_of_the_eager_call(backend, device):
    """What the compiled function launches are torch's operations, whatever the backend."""
    torch._dynamo.reset()
    given = operands(device, torch.float16)

    def call(*tensors):
        return linear_cross_entropy(*tensors, backend=backend)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = everything(compiled, *given)
    expected = everything(lambda *t: linear_cross_entropy(*t, backend="reference"), *given)
    assert all(map(torch.equal, found, expected))


def test_transforms_raise_rather_than_be_wrong():
    x, weight, targets = (t.detach() for t in operands(dtype=torch.bfloat16))

    def loss(x):
        return linear_cross_entropy(x, weight, targets)

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(x)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(loss)(torch.stack([x, x]))


def test_second_derivative_raises():
    x, weight, targets = operands(dtype=torch.bfloat16)
    loss = linear_cross_entropy(x, weight, targets).square()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.float().square().sum().backward()


def test_backend_is_one_of_three():
    with pytest.raises(ValueError, match='backend must be "auto", "triton" or "reference"'):
        linear_cross_entropy(*operands(), backend="torch")


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_rows_without_columns_have_the_loss_of_equal_logits(backend, device):
    x, weight = torch.zeros(3, 0, device=device), torch.zeros(5, 0, device=device)
    loss = linear_cross_entropy(x, weight, torch.arange(3, device=device), backend=backend)
    torch.testing.assert_close(loss, torch.tensor(5.0, device=device).log())


def test_autocast_leaves_fp64_as_it_is(device):
    given = operands(device, torch.float64)
    with torch.autocast(device, torch.bfloat16):
        found = everything(linear_cross_entropy, *given)
    assert all(map(torch.equal, found, everything(linear_cross_entropy, *given)))
