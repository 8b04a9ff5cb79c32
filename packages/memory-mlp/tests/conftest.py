"""What the tests of this package share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fusewright.memory_mlp import NeuralMemory

from .operations import GatedOp, InputOp, ReadOp, UpdateOp
from .operations_scan import ScanOp

# Tensors are tiny here: a second thread costs more than it computes, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture
def memory_of(device: str) -> Callable[..., NeuralMemory]:
    """Makes small layers whose parameters are all drawn, so that no gate stands at its start."""

    @torch.no_grad()
    def make(**options: Any) -> NeuralMemory:
        sizes = dict(heads=2, head_dim=5, hidden=7, chunk=6, dtype=torch.float64, device=device)
        memory = NeuralMemory(9, **sizes | options)
        for parameter in memory.parameters():
            parameter.normal_(std=0.4)
        return memory

    return make


@pytest.fixture
def update_op() -> UpdateOp:
    return UpdateOp()


@pytest.fixture
def scan_op() -> ScanOp:
    return ScanOp()


@pytest.fixture
def read_op() -> ReadOp:
    return ReadOp()


@pytest.fixture
def input_op() -> InputOp:
    return InputOp()


@pytest.fixture
def gated_op() -> GatedOp:
    return GatedOp()


def multiplied_in(precision: str) -> Iterator[None]:
    """torch multiplies fp32 matrices in this precision."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture(params=["ieee", "tf32"])
def fp32_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from multiplied_in(request.param)


@pytest.fixture
def in_tf32() -> Iterator[None]:
    yield from multiplied_in("tf32")


@pytest.fixture
def many_input_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that few tokens take several, and partial sums that are added in several
    rounds.
    """
    from fusewright.memory_mlp.inputs import launch, launch_tokens

    small = launch_tokens.TokensTile(size=64, num_warps=1)
    # A warp has 32 numbers, rows of up to 8 columns; some windows are longer than a run.
    runs = (launch.RunTile(run=2, numbers=1, num_warps=1),)
    parts = launch.PartsTile(numbers=16, parts=2, num_warps=1)
    plans = (
        *(launch.forward_plan, launch.backward_plan, launch_tokens.token_plan),
        *(launch_tokens.gated_plan, launch_tokens.gated_backward_plan, launch_tokens.count_plan),
    )
    for plan in plans:
        plan.cache_clear()
    monkeypatch.setattr(launch, "FORWARD", runs)
    monkeypatch.setattr(launch, "BACKWARD", runs)
    monkeypatch.setattr(launch, "ADD_PARTS", parts)
    monkeypatch.setattr(launch_tokens, "TOKENS", small)
    gated = launch_tokens.GatedTile(numbers=16, held=1, num_warps=1)
    monkeypatch.setattr(launch_tokens, "GATED_TOKENS", gated)
    monkeypatch.setattr(launch_tokens, "GATED_TOKENS_BACKWARD", gated)
    weights = launch_tokens.WeightsTile(columns=16, tokens=16)
    monkeypatch.setattr(launch_tokens, "GATE_WEIGHTS", weights)
    count = launch_tokens.CountTile(size=4, num_warps=1)
    monkeypatch.setattr(launch_tokens, "COUNTED_TOKENS", count)
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.fixture
def many_read_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that few numbers take several, and tokens that are split among programs."""
    from fusewright.memory_mlp.read import launch

    plans = launch.forward_plan, launch.backward_plan
    for plan in plans:
        plan.cache_clear()
    for name, tile in (("FORWARD", "ReadTile"), ("BACKWARD", "ReadBackwardTile")):
        small = dict(tokens=16, block_h=16, num_warps=2)
        if name == "BACKWARD":
            small |= dict(units=16, num_stages=1, split_tokens=32, fills=100)
        lines = [
            getattr(launch, tile)(precision, **small) for precision in ("narrow", "tf32", "tf32x3")
        ]
        monkeypatch.setattr(launch, name, tuple(lines))
    yield
    for plan in plans:
        plan.cache_clear()


@pytest.fixture
def parts_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Once called, a scan's backward pass takes one chunk at a time."""
    from fusewright.memory_mlp.scan import launch_backward

    def cut() -> None:
        monkeypatch.setattr(launch_backward, "PART_BYTES", 1)
        launch_backward.backward_plan.cache_clear()

    yield cut
    launch_backward.backward_plan.cache_clear()


@pytest.fixture
def fresh_updates() -> Iterator[None]:
    """No update planned before the test, and none of its own kept: for tests that change tables."""
    from fusewright.memory_mlp.update.launch import update_plan
    from fusewright.memory_mlp.update.launch_backward import backward_plan

    for plan in (update_plan, backward_plan):
        plan.cache_clear()
    yield
    for plan in (update_plan, backward_plan):
        plan.cache_clear()


@pytest.fixture
def many_update_programs(fresh_updates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that few numbers take several in every direction, and rows that are split."""
    from fusewright.memory_mlp._core.backends import DeviceProperties
    from fusewright.memory_mlp.update import launch, launch_backward, problem

    lines = tuple(
        problem.UpdateTile(precision, 16, 16, 16, 1, 1, aligned=False)
        for precision in ("narrow", "tf32", "ieee")
    )
    tables = {
        launch: ("HIDDEN", "RESIDUAL", "SLOPE", "GRADIENTS"),
        launch_backward: ("P_BAR", "E_BAR", "E_BAR_AND_R", "Z_BAR", "DK", "DWEIGHTS"),
    }
    for module, names in tables.items():
        for name in names:
            monkeypatch.setattr(module, name, lines)
    block = problem.UpdateBlock(block=128, num_warps=1)
    monkeypatch.setattr(launch, "STEP", block)
    monkeypatch.setattr(problem, "TRANSPOSE", problem.UpdateBlock(block=16, num_warps=1))
    for name in ("INNER_PRODUCTS", "COTANGENTS"):
        monkeypatch.setattr(launch_backward, name, block)
    monkeypatch.setattr(problem, "ADD_SPLITS", block)
    gpu = DeviceProperties(multiprocessors=200, shared_bytes=99 << 10, capability=90)
    monkeypatch.setattr(problem, "device_properties", lambda device: gpu)
    monkeypatch.setattr(problem, "ROWS_OF_A_SPLIT", 16)


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
