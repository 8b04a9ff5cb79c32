"""What holds of the whole package: names, registration, import."""

from __future__ import annotations

import subprocess
import sys

import torch
from fusewright import reversible


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(reversible.__all__) == {
        "Backend",
        "FixedPoint",
        "MidpointStack",
        "Mode",
        "Passed",
        "Stepped",
        "Tape",
        "__version__",
        "available_backends",
    }
    assert all(hasattr(reversible, name) for name in reversible.__all__)


def test_import_needs_torch_only_and_works_without_triton():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fusewright.reversible import MidpointStack, available_backends\n"
        "assert available_backends() == ('reference',)\n"
        "class Layer(torch.nn.Linear):\n"
        "    def force(self, x, *, tape):\n"
        "        return torch.tanh(self(x)), None\n"
        "stack = MidpointStack([Layer(4, 4) for _ in range(3)])\n"
        "stack(torch.randn(2, 4)).x.square().sum().backward()\n"
        "assert all(p.grad.isfinite().all() for p in stack.parameters())\n"
    )


def test_import_does_not_import_triton():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.reversible\nassert ('triton' in sys.modules) == before\n"
    )


def test_no_op_is_registered():
    """A step sets a flag that it is given: a function, where an op would return another."""
    names = torch._C._dispatch_get_all_op_names()
    assert [name for name in names if "fusewright_reversible" in name] == []
