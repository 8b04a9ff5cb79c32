"""What holds of every function of the package."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import fusewright.example
import pytest
import torch
from fusewright.example import scale
from fusewright_testkit import capture, no_synchronisation


def test_public_names_are_there():
    assert [n for n in fusewright.example.__all__ if not hasattr(fusewright.example, n)] == []


def test_version_is_that_of_the_distribution():
    assert fusewright.example.__version__ == version("fusewright-example")


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.example import available_backends, scale\n"
        "assert available_backends() == ('reference',)\n"
        "assert scale(torch.ones(3), 2.0).tolist() == [2.0, 2.0, 2.0]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_op_passes_opcheck(device):
    x = torch.randn(5, 3, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.fusewright_example.scale.default, (x, 0.3))


def test_compiles_to_one_graph_with_equal_results(device):
    def step(x):
        return torch.tanh(scale(x, 0.3, backend="triton")).sum()

    x = torch.randn(9, device=device, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(step(x), x)
    (found,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(found, expected)


def test_function_transforms_agree_with_autograd(device):
    x = torch.randn(4, 3, device=device)
    found = torch.func.grad(lambda x: scale(x, 0.3, backend="triton").square().sum())(x)
    torch.testing.assert_close(found, 2 * 0.3**2 * x)
    mapped = torch.func.vmap(lambda x: scale(x, 0.3, backend="triton"))(x)
    assert torch.equal(mapped, scale(x, 0.3, backend="triton"))


@pytest.mark.gpu
def test_replay_of_a_cuda_graph_equals_eager():
    x = torch.randn(1000, device="cuda")
    graph, y = capture(lambda: scale(x, 0.3))
    x.normal_()
    graph.replay()
    assert torch.equal(y, scale(x, 0.3))


@pytest.mark.gpu
def test_no_host_synchronisation():
    x = torch.randn(1000, device="cuda", requires_grad=True)
    scale(x, 0.3).backward(torch.ones_like(x))
    with no_synchronisation():
        scale(x, 0.3).backward(torch.ones_like(x))
