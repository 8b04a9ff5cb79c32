"""What benchmarks set in other libraries' optimizers makes their steps ours."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest
import torch
from fusewright.optimizer import Muon, newton_schulz
from fusewright_testkit import Yardstick
from fusewright_testkit.bench import load
from fusewright_testkit.cases import Absent

bench = load(pathlib.Path(__file__).parents[1])
peers = bench.peers
SHAPES = [(33, 70), (70, 33), (2, 40, 40)]


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=str)
def test_rate_of_a_shape_is_that_of_muon(shape):
    optimizer = Muon([torch.nn.Parameter(torch.ones(shape))])
    (group,) = optimizer.param_groups
    assert peers.rate_of(0.5, shape) == 0.5 * optimizer._scale_of(*shape, group)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dions_products_make_the_chain_of_newton_schulz(monkeypatch, shape):
    products = types.ModuleType("dion.newton_schulz_triton")
    products.ns_line_1 = lambda x: x @ x.mT
    products.ns_line_2 = lambda a, alpha, beta: torch.baddbmm(a, a, a, alpha=alpha, beta=beta)
    monkeypatch.setitem(sys.modules, "dion", types.ModuleType("dion"))
    monkeypatch.setitem(sys.modules, products.__name__, products)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    yardstick = Yardstick(newton_schulz, [drawn], [None])
    yardstick.check(lambda x: peers.by_dions_products(x, torch.tensor(1e-8)))


def test_every_provider_serves_ops_of_cases_or_says_why_it_is_absent():
    ops = {case.op for case in bench.cases()}
    for functions in bench.providers().values():
        assert functions.keys() <= ops
        assert functions or isinstance(functions, Absent)
