"""Transforms of the kernels and of the reference."""

from __future__ import annotations

import pytest
import torch
from fusewright.hyper_connections import stream_read, stream_write


def around(x, phi, backend):
    """A reading and a writing; one number in which all counts."""
    n = x.shape[-2]
    ones = torch.ones(3, device=x.device), torch.ones(n * (n + 2), device=x.device)
    found = stream_read(x, phi, *ones, backend=backend)
    res = found.logits.softmax(-1)
    return (
        stream_write(found.mixed, res, found.post, found.u.tanh(), backend=backend).square().sum()
    )


def test_transforms_of_the_kernels_raise_rather_than_be_wrong(device):
    x, phi = torch.randn(3, 2, 4, device=device), torch.randn(8, 8, device=device)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(around)(x, phi, "triton")
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(around, (0, None, None))(x, phi, "triton")


def test_transforms_of_the_reference_are_those_of_autograd():
    x, phi = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(around(leaf, phi, "reference"), leaf)
    torch.testing.assert_close(torch.func.grad(around)(x, phi, "reference"), expected)
    mapped = torch.func.vmap(torch.func.grad(around), (0, None, None))(x, phi, "reference")
    torch.testing.assert_close(mapped, expected)


def test_second_derivative_of_the_kernels_raises(device):
    x = torch.randn(3, 2, 4, device=device, requires_grad=True)
    phi = torch.randn(8, 8, device=device)
    (dx,) = torch.autograd.grad(around(x, phi, "triton"), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.square().sum().backward()
