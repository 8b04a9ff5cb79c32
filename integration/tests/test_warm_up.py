"""A warm-up compiles what a step of a model launches, of all packages, and changes no model."""

from __future__ import annotations

import pytest
import torch
from fusewright_models import HYBRID, HybridLM, warm_up
from fusewright_testkit.warmed import assert_warm_up_compiles_what_calls_compile


@pytest.fixture(params=["transformer-np", "titan-mac", "hybrid"])
def loss_and_batch(request, small, rows, titan_mac, draw_tokens):
    if request.param == "transformer-np":
        return small(backend="triton").loss, rows(2, 5, 4)
    if request.param == "titan-mac":
        return titan_mac("mac", backend="triton").loss, (draw_tokens(2),)
    return HybridLM(HYBRID["tiny"], backend="triton").loss, (torch.randint(256, (2, 41)),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the interpreter")
def test_no_kernel_of_a_step_runs_and_the_model_stays_as_it_is(loss_and_batch, monkeypatch):
    from triton.runtime import interpreter

    asked = []

    def run(function, *args, grid, warmup, **options):
        assert warmup, "a kernel ran"
        asked.append(function.fn.__name__)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    loss, batch = loss_and_batch
    model = loss.__self__
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random_numbers = torch.get_rng_state()
    warm_up(loss, *batch)
    assert any("backward" in name or "grad" in name for name in asked)
    after = model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_numbers)


HEAD = """
import torch
from fusewright_models import (
    HYBRID, TITAN_MAC, HybridLM, TitanMAC, TransformerNP, TransformerNPConfig, warm_up
)

torch.manual_seed(0)


def function(*inputs):
    with torch.autocast("cuda", torch.bfloat16):
        return model.loss(*inputs)


"""
NEURAL_PROCESS = """
config = TransformerNPConfig(x_width=1, width=128, layers=2, heads=2, feed_forward_width=341)
model = TransformerNP(config)
inputs = [torch.randn(4, rows, width).cuda() for rows in (200, 60) for width in (1, 1)]
"""
TITANS = """
model = TitanMAC(TITAN_MAC["tiny"])
inputs = [torch.randint(TITAN_MAC["tiny"].vocab_size, (2, 100)).cuda()]
"""
HYBRID_MODEL = """
model = HybridLM(HYBRID["tiny"])
inputs = [torch.randint(256, (2, 301)).cuda()]
"""
TAIL = """
model.cuda()
leaves = list(model.parameters())
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(NEURAL_PROCESS, id="transformer-np"),
        pytest.param(TITANS, id="titan-mac", marks=pytest.mark.slow),
        pytest.param(HYBRID_MODEL, id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_warm_up_compiles_what_a_step_compiles(model, tmp_path):
    assert_warm_up_compiles_what_calls_compile(HEAD + model + TAIL, tmp_path)
