"""What holds of every function of the package."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import fusewright.optimizer


def test_public_names_are_there():
    assert [n for n in fusewright.optimizer.__all__ if not hasattr(fusewright.optimizer, n)] == []


def test_version_is_that_of_the_distribution():
    assert fusewright.optimizer.__version__ == version("fusewright-optimizer")


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.optimizer import AdamW, available_backends, grad_norm\n"
        "assert available_backends() == ('reference',)\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "AdamW([p], lr=0.5, weight_decay=0.0).step()\n"
        "assert p.tolist() == [0.5, 0.5, 0.5]\n"
        "assert grad_norm([torch.tensor([3.0, 4.0])]).item() == 5.0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
