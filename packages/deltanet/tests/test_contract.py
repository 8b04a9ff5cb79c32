"""What holds of the whole package: names, registration, import, what machines can run."""

from __future__ import annotations

import subprocess
import sys

import torch
from fusewright import deltanet


def in_a_fresh_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_public_names_are_what_the_package_offers():
    assert set(deltanet.__all__) == {
        "Backend",
        "DeltaNetCache",
        "GatedDeltaNet",
        "GatedDeltaRule",
        "__version__",
        "available_backends",
        "gated_delta_rule",
        "gated_delta_rule_step",
    }
    assert all(hasattr(deltanet, name) for name in deltanet.__all__)


def test_import_needs_torch_only_and_works_without_triton_and_fla():
    in_a_fresh_python(
        "import sys; sys.modules['triton'] = None; sys.modules['fla'] = None\n"
        "import torch\n"
        "from fusewright.deltanet import GatedDeltaNet, available_backends\n"
        "assert available_backends() == ('reference',)\n"
        "layer = GatedDeltaNet(6, head_dim=4, num_heads=2)\n"
        "layer(torch.randn(2, 5, 6)).square().sum().backward()\n"
        "assert all(x.grad.isfinite().all() for x in layer.parameters())\n"
    )


def test_import_imports_neither_triton_nor_fla():
    in_a_fresh_python(
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import fusewright.deltanet\nassert ('triton' in sys.modules) == before\n"
        "assert 'fla' not in sys.modules\n"
    )


def test_no_other_op_is_registered():
    found = {
        name for name in torch._C._dispatch_get_all_op_names() if "fusewright_deltanet" in name
    }
    names = {
        "gated_delta_rule",
        "gated_delta_rule_backward",
        "gated_delta_rule_step",
        "gated_norm",
        "gated_norm_backward",
        "short_convolution",
        "short_convolution_backward",
    }
    assert found == {f"fusewright_deltanet::{name}" for name in names}
