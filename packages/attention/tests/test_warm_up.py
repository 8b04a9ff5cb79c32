"""A warm-up compiles exactly what calls compile, of every family of kernels."""

from __future__ import annotations

import pytest
from fusewright_testkit.warmed import assert_warm_up_compiles_what_calls_compile

pytestmark = pytest.mark.gpu

# Of so many scores that a Hopper GPU takes its own kernels, and of so few that one tile serves.
RECTANGULAR = """
import torch
from fusewright.attention import rectangular_attention, warm_up

torch.manual_seed(0)


def draw(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def function(*inputs):
    many, few = (rectangular_attention(*x) for x in (inputs[:3], inputs[3:]))
    return many.float().sum() + few.float().sum()


inputs = leaves = (
    *(draw(1, rows, 8, 64) for rows in (5000, 4000, 4000)),
    *(draw(3, rows, 8, 64) for rows in (100, 50, 50)),
)
"""
SEQUENCE = """
import torch
from fusewright.attention import apply_rotary, rotary, sliding_window_attention, warm_up

torch.manual_seed(0)


def function(q, kv, cos, sin):
    q = apply_rotary(q, cos, sin)
    k, v = rotary(kv, cos, sin).unbind(2)
    return sliding_window_attention(q, k, v, window=100).float().square().sum()


q, kv = (
    torch.randn(2, 300, *shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    for shape in ((4, 64), (2, 4, 64))
)
angles = torch.rand(300, 32, device="cuda")
inputs, leaves = (q, kv, angles.cos(), angles.sin()), (q, kv)
"""


@pytest.mark.parametrize("case", [RECTANGULAR, SEQUENCE], ids=["rectangular", "sequence"])
def test_warm_up_compiles_what_calls_compile(case, tmp_path):
    assert_warm_up_compiles_what_calls_compile(case, tmp_path)
