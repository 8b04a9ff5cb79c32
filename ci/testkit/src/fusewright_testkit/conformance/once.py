"""Operations whose kernels are differentiated once: what they do not have raises."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from .. import transforms

F32, F64 = torch.float32, torch.float64


def of_first(op, device, dtype, backend):
    """The loss as a function of the first operand, and that operand."""
    x, *others = op.sample(op.small, dtype, device)
    loss = transforms.loss(lambda *tensors: op.public(*tensors, backend=backend))
    return lambda x: loss(x, *others), x


def test_transforms_of_the_kernels_raise_rather_than_be_wrong(op, device):
    loss, x = of_first(op, device, F32, "triton")
    with pytest.raises(RuntimeError, match="setup_context"):
        grad(loss)(x)
    with pytest.raises(RuntimeError, match="setup_context"):
        vmap(loss)(torch.stack([x, x]))


def test_second_derivative_of_the_kernels_raises(op, device):
    loss, x = of_first(op, device, F32, "triton")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.square().sum().backward()


def test_transforms_of_the_reference_are_those_of_autograd(op):
    loss, x = of_first(op, "cpu", F64, "reference")
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(x), expected)
    mapped = vmap(grad(loss))(torch.stack([x, x]))
    torch.testing.assert_close(mapped, torch.stack([expected, expected]))
