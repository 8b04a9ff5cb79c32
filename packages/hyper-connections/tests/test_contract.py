"""What holds of the whole package: names, registration, import, transforms."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fusewright import hyper_connections
from fusewright.hyper_connections import stream_read, stream_write


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(hyper_connections.__all__) == {
        "Backend",
        "StreamReading",
        "__version__",
        "available_backends",
        "stream_coefficients",
        "stream_read",
        "stream_write",
    }
    assert all(hasattr(hyper_connections, name) for name in hyper_connections.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.hyper_connections import available_backends, stream_read, stream_write\n"
        "assert available_backends() == ('reference',)\n"
        "x = torch.randn(3, 2, 4, requires_grad=True)\n"
        "found = stream_read(x, torch.randn(8, 8), torch.ones(3), torch.zeros(8))\n"
        "res = found.logits.softmax(-1)\n"
        "stream_write(found.mixed, res, found.post, found.u).square().sum().backward()\n"
        "assert x.grad.isfinite().all()\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.hyper_connections\nassert ('triton' in sys.modules) == before\n"
    )


def test_no_other_op_is_registered():
    names = torch._C._dispatch_get_all_op_names()
    found = {name for name in names if "fusewright_hyper_connections" in name}
    passes = ("stream_read", "stream_read_backward", "stream_write", "stream_write_backward")
    assert found == {f"fusewright_hyper_connections::{name}" for name in passes}


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
