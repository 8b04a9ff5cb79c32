"""A warm-up compiles exactly what calls compile, of the rule and of the layer around it."""

from __future__ import annotations

import pytest
from fusewright_testkit.warmed import assert_warm_up_compiles_what_calls_compile

pytestmark = pytest.mark.gpu

LAYER = """
import torch
from fusewright.deltanet import GatedDeltaNet, warm_up

torch.manual_seed(0)
layer = GatedDeltaNet(256, 1.0, 64, 4, device="cuda", dtype=torch.bfloat16, backend="triton")


def function(x):
    return layer(x).float().square().sum()


inputs = (torch.randn(2, 100, 256, device="cuda", dtype=torch.bfloat16),)
leaves = tuple(layer.parameters())
"""


def test_warm_up_compiles_what_calls_compile(tmp_path):
    assert_warm_up_compiles_what_calls_compile(LAYER, tmp_path)
